#include "kvpool/sequence/block_table.hpp"

namespace kvpool {

std::int64_t BlockTable::count_slots(const std::int32_t* begin, const std::int32_t* end) noexcept {
    return std::count_if(begin, end, [](std::int32_t slot) { return slot >= 0; });
}

}  // namespace kvpool
