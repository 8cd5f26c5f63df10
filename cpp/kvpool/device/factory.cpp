#include "kvpool/device/factory.hpp"

#include <string>

#include "kvpool/core/errors.hpp"
#include "kvpool/device/host_device.hpp"
#include "kvpool/device/sim_device.hpp"
#include "kvpool/device/virtual_device.hpp"

namespace kvpool {

std::shared_ptr<Device> make_device(std::string_view name) {
    if (name == "auto" || name == "host") {
        return std::make_shared<HostDevice>();
    }
    if (name == "virtual") {
        return std::make_shared<VirtualDevice>();
    }
    if (name == "sim") {
        return SimDevice::create();
    }
    if (name == "cuda") {
        throw UnsupportedError("device \"cuda\" is not built yet; legal now: auto, host, virtual, sim");
    }
    throw ConfigError("device must be auto, host, virtual, sim or cuda, got \"" + std::string(name) + "\"");
}

}  // namespace kvpool
