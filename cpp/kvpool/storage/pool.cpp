#include "kvpool/storage/pool.hpp"

#include <string>

#include "kvpool/core/errors.hpp"
#include "kvpool/core/math.hpp"

namespace kvpool {

Pool::Pool(Device& device, std::int64_t slot_bytes, std::int64_t num_slots, std::int64_t grain)
    : slot_bytes_(slot_bytes), num_slots_(num_slots) {
    const Int128 bytes = round_up(Int128{slot_bytes} * Int128{num_slots}, Int128{grain});
    if (bytes > Int128{kHuge}) {
        throw CuOomError("a pool of " + std::to_string(num_slots) + " slots of " + std::to_string(slot_bytes) +
                         " bytes is above 2^62 bytes");
    }
    if (bytes == 0) {
        return;  // no slots, no memory
    }
    arena_ = device.reserve(static_cast<std::int64_t>(bytes));
    arena_->commit(0, static_cast<std::int64_t>(bytes));
    address_ = arena_->address();
}

}  // namespace kvpool
