// Device names to devices.
#pragma once

#include <memory>
#include <string_view>

#include "kvpool/device/device.hpp"

namespace kvpool {

// "auto" (host for now), "host", "virtual", "sim"; "cuda" is an UnsupportedError in this build; anything else a
// ConfigError that names the legal ones.
[[nodiscard]] std::shared_ptr<Device> make_device(std::string_view name);

}  // namespace kvpool
