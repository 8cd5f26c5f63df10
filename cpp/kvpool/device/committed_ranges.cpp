#include "kvpool/device/committed_ranges.hpp"

#include <iterator>
#include <string>

#include "kvpool/core/errors.hpp"

namespace kvpool {

namespace {

std::string show(std::int64_t offset, std::int64_t length) {
    return "offset " + std::to_string(offset) + ", length " + std::to_string(length);
}

}  // namespace

void CommittedRanges::check_shape(std::int64_t offset, std::int64_t length) const {
    const bool inside = offset >= 0 && length > 0 && offset <= bytes_ && length <= bytes_ - offset;
    if (!inside || offset % granularity_ != 0 || length % granularity_ != 0) {
        throw ArgumentError("arena range (" + show(offset, length) + ") must be non-empty, a multiple of " +
                            std::to_string(granularity_) + " bytes, and inside the arena of " + std::to_string(bytes_) +
                            " bytes");
    }
}

void CommittedRanges::check_add(std::int64_t offset, std::int64_t length) const {
    check_shape(offset, length);
    const auto after = ends_.lower_bound(offset + length);
    if (after != ends_.begin() && std::prev(after)->second > offset) {
        throw LogicError("arena range (" + show(offset, length) + ") is committed already");
    }
}

void CommittedRanges::check_remove(std::int64_t offset, std::int64_t length) const {
    check_shape(offset, length);
    if (!contains(offset, length)) {
        throw LogicError("arena range (" + show(offset, length) + ") is not committed");
    }
}

void CommittedRanges::add(std::int64_t offset, std::int64_t length) {
    check_add(offset, length);
    std::int64_t begin = offset;
    std::int64_t end = offset + length;
    auto after = ends_.lower_bound(end);
    if (after != ends_.end() && after->first == end) {
        end = after->second;
        after = ends_.erase(after);
    }
    if (after != ends_.begin() && std::prev(after)->second == begin) {
        const auto before = std::prev(after);
        begin = before->first;
        ends_.erase(before);
    }
    ends_[begin] = end;
    total_ += length;
}

void CommittedRanges::remove(std::int64_t offset, std::int64_t length) {
    check_remove(offset, length);
    const auto it = std::prev(ends_.upper_bound(offset));
    const std::int64_t begin = it->first;
    const std::int64_t end = it->second;
    ends_.erase(it);
    if (begin < offset) {
        ends_[begin] = offset;
    }
    if (offset + length < end) {
        ends_[offset + length] = end;
    }
    total_ -= length;
}

bool CommittedRanges::contains(std::int64_t offset, std::int64_t length) const noexcept {
    if (offset < 0 || length < 0) {
        return false;
    }
    const auto it = ends_.upper_bound(offset);
    if (it == ends_.begin()) {
        return false;
    }
    const std::int64_t end = std::prev(it)->second;
    return offset <= end && length <= end - offset;
}

}  // namespace kvpool
