// How messages of errors begin: "resize()" or "step(): request 3". Costs nothing until there is a message.
#pragma once

#include <cstdint>
#include <string>

namespace kvpool {

struct Where {
    const char* call;
    std::int64_t position = -1;
    [[nodiscard]] std::string text() const {
        return std::string(call) + "()" + (position < 0 ? "" : ": request " + std::to_string(position));
    }
};

}  // namespace kvpool
