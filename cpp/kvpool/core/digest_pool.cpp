#include "kvpool/core/digest_pool.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "kvpool/core/errors.hpp"

namespace kvpool {

// The treap's view of the records.
struct DigestPool::Access {
    Slab<Record>& records;
    [[nodiscard]] TreapLinks& links(std::int32_t index) const noexcept { return records[index].links; }
};

namespace {

int order(const Digest& a, const Digest& b) noexcept { return std::memcmp(a.data(), b.data(), a.size()); }

}  // namespace

Query DigestPool::encode(TokenSpan ids, std::span<const Digest> digests, const char* name,
                         std::vector<Token>& scratch) const {
    if (digests.empty()) {
        return {.tokens = ids, .raw = true, .unknown = {}, .name = name};
    }
    scratch.assign(ids.begin(), ids.end());
    for (std::size_t i = find_negative(scratch); i < scratch.size(); ++i) {
        if (is_digest(scratch[i])) {
            const auto j = static_cast<std::size_t>(digest_index(scratch[i]));
            if (j >= digests.size()) {
                throw_bad_token(name, i, ids[i]);
            }
            const std::int32_t index = find(digests[j]);
            scratch[i] = index == kNil ? unknown_token(j) : digest_token(index);
        }
    }
    return {.tokens = scratch, .raw = false, .unknown = digests, .name = name};
}

void DigestPool::intern(TokenSpan ids, std::span<const Digest> digests, Token* out) {
    if (ids.empty()) {
        return;
    }
    std::memcpy(out, ids.data(), ids.size_bytes());
    for (std::size_t i = find_negative(ids); i < ids.size(); ++i) {
        if (is_digest(ids[i])) {
            const Digest& digest = digests[static_cast<std::size_t>(digest_index(ids[i]))];
            std::int32_t index = find(digest);
            if (index == kNil) {
                index = add(digest);
            }
            journal_->add(records_[index].refs, 1);
            out[i] = digest_token(index);
        }
    }
}

void DigestPool::check_ids(TokenSpan ids, std::size_t num_digests, const std::string& name) {
    for (std::size_t i = find_negative(ids); i < ids.size(); ++i) {
        if (is_digest(ids[i]) && static_cast<std::size_t>(digest_index(ids[i])) >= num_digests) {
            throw_bad_token(name, i, ids[i]);
        }
    }
}

void DigestPool::retain(TokenSpan tokens) {
    for (std::size_t i = find_negative(tokens); i < tokens.size(); ++i) {
        if (is_digest(tokens[i])) {
            journal_->add(records_[index_of(tokens[i])].refs, 1);
        }
    }
}

void DigestPool::release(TokenSpan tokens) {
    for (std::size_t i = find_negative(tokens); i < tokens.size(); ++i) {
        if (is_digest(tokens[i])) {
            Record& record = records_[index_of(tokens[i])];
            journal_->add(record.refs, -1);
            if (record.refs == 0) {
                drop(index_of(tokens[i]));
            }
        }
    }
}

int DigestPool::compare(Token a, const Query& query, Token b) const noexcept {
    if (is_digest(a) && is_digest(b)) {
        if (query.raw) {
            return 1;  // no digest, but an error that will be found
        }
        return a == b ? 0 : order(bytes(a, query), bytes(b));
    }
    if (is_digest(a) != is_digest(b)) {
        return is_digest(a) ? 1 : -1;
    }
    return a < b ? -1 : static_cast<int>(a > b);
}

void DigestPool::decode(TokenSpan tokens, Token* out, std::vector<Digest>& digests) const {
    if (tokens.empty()) {
        return;
    }
    std::memcpy(out, tokens.data(), tokens.size_bytes());
    std::vector<std::pair<Token, Token>> seen;  // encoded token, raw one; ascending
    for (std::size_t i = find_negative(tokens); i < tokens.size(); ++i) {
        if (is_digest(tokens[i])) {
            auto it = std::lower_bound(seen.begin(), seen.end(), std::pair{tokens[i], kFirstUnknown});
            if (it == seen.end() || it->first != tokens[i]) {
                it = seen.insert(it, {tokens[i], digest_token(static_cast<std::int64_t>(digests.size()))});
                digests.push_back(bytes(tokens[i]));
            }
            out[i] = it->second;
        }
    }
}

std::int64_t DigestPool::refs(const Digest& digest) const noexcept {
    const std::int32_t index = find(digest);
    return index == kNil ? 0 : records_[index].refs;
}

std::int32_t DigestPool::find(const Digest& digest) const noexcept {
    std::int32_t index = root_;
    while (index != kNil) {
        const Record& record = records_[index];
        const int way = order(digest, record.bytes);
        if (way == 0) {
            break;
        }
        index = way < 0 ? record.links.left : record.links.right;
    }
    return index;
}

std::int32_t DigestPool::add(const Digest& digest) {
    if (size_ == kMaxDigests) {
        throw OutOfMemoryError("more than 2^30 different digests");
    }
    const std::int32_t index = records_.take(*journal_);
    Record& record = records_[index];  // nobody had it in this call: written past the journal
    record.bytes = digest;
    record.refs = 0;
    Access access{records_};
    treap_insert(*journal_, root_, index, access,
                 [&](std::int32_t other) { return order(digest, records_[other].bytes); });
    journal_->add(size_, 1);
    return index;
}

void DigestPool::drop(std::int32_t index) {
    Access access{records_};
    const Digest& digest = records_[index].bytes;
    treap_erase(*journal_, root_, index, access,
                [&](std::int32_t other) { return order(digest, records_[other].bytes); });
    journal_->add(size_, -1);
    records_.give(*journal_, index);
}

void DigestPool::audit(std::span<const std::pair<Token, std::int64_t>> expected) const {
    std::int64_t found = 0;
    std::vector<std::int32_t> stack;
    std::int32_t index = root_;
    const Digest* previous = nullptr;
    const auto fail = [](const std::string& what) { throw CorruptedError("digest pool: " + what); };
    while (index != kNil || !stack.empty()) {
        for (; index != kNil; index = records_[index].links.left) {
            stack.push_back(index);
        }
        index = stack.back();
        stack.pop_back();
        const Record& record = records_[index];
        if (previous != nullptr && order(*previous, record.bytes) >= 0) {
            fail("out of order");
        }
        const auto it = std::lower_bound(expected.begin(), expected.end(),
                                         std::pair{digest_token(index), std::numeric_limits<std::int64_t>::min()});
        const std::int64_t refs = it != expected.end() && it->first == digest_token(index) ? it->second : 0;
        if (refs != record.refs) {
            fail("digest " + std::to_string(index) + " has " + std::to_string(record.refs) + " references, not " +
                 std::to_string(refs));
        }
        previous = &record.bytes;
        index = record.links.right;
        ++found;
    }
    if (found != size_ || found != static_cast<std::int64_t>(expected.size())) {
        fail(std::to_string(size_) + " digests, of which " + std::to_string(found) + " can be found and " +
             std::to_string(expected.size()) + " are named");
    }
}

}  // namespace kvpool
