// The digests that a manager stores, each once, with a count of the tokens that name it.
//
// Rule: whoever stores encoded tokens (a node, a cache's tail) retains them, and releases them when it lets them go: one
// reference per digest token.  A digest whose count is 0 is forgotten and its index given to the next new one.
// Finding a digest takes O(log digests).  Counts, index and free list are changed through the journal.  Indices are internal:
// nothing that leaves the process shows them.  Not thread safe: used under the manager's lock.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/core/journal.hpp"
#include "kvpool/core/slab.hpp"
#include "kvpool/core/tokens.hpp"
#include "kvpool/core/treap.hpp"

namespace kvpool {

class DigestPool {
public:
    explicit DigestPool(Journal& journal) noexcept : journal_(&journal) {}

    // The query of raw tokens.  Without digests it is the ids themselves; else they are encoded into `scratch`.  Takes no
    // references: valid until the pool changes.  ArgumentError naming the token for a negative one that is no digest (only if
    // there are digests, see Query::raw).
    [[nodiscard]] Query encode(TokenSpan ids, std::span<const Digest> digests, const char* name,
                               std::vector<Token>& scratch) const;
    // Encodes raw tokens for keeping, out[0 .. ids.size()), and retains them; digests that are new are added.  The ids have been
    // checked (check_ids).  `out` is not journaled.
    void intern(TokenSpan ids, std::span<const Digest> digests, Token* out);
    // ArgumentError in the words of throw_bad_token() for the first negative that is no digest.
    static void check_ids(TokenSpan ids, std::size_t num_digests, const std::string& name);

    // One more, one fewer reference for each digest among tokens that are stored.
    void retain(TokenSpan tokens);
    void release(TokenSpan tokens);

    // The bytes of a digest token; `query` knows the unknown ones.
    [[nodiscard]] const Digest& bytes(Token token) const noexcept { return records_[index_of(token)].bytes; }
    [[nodiscard]] const Digest& bytes(Token token, const Query& query) const noexcept {
        return is_unknown(token) ? query.unknown[static_cast<std::size_t>(std::int64_t{token} - kFirstUnknown)]
                                 : bytes(token);
    }
    // Order of two tokens, of which `a` may belong to `query`: < 0, 0, > 0.
    [[nodiscard]] int compare(Token a, const Query& query, Token b) const noexcept;

    // Raw form of encoded tokens: ids into out[0 .. tokens.size()), digests appended to `digests` in the order of their first
    // use.
    void decode(TokenSpan tokens, Token* out, std::vector<Digest>& digests) const;

    [[nodiscard]] std::int64_t size() const noexcept { return size_; }
    // References of one digest, 0 if the pool does not have it.
    [[nodiscard]] std::int64_t refs(const Digest& digest) const noexcept;
    // CorruptedError unless exactly these digest tokens, ascending, are stored and have so many references.  O(n log n).
    void audit(std::span<const std::pair<Token, std::int64_t>> expected) const;

private:
    struct Record {
        std::int32_t link;  // the slab's
        TreapLinks links;
        std::int64_t refs;
        Digest bytes;
    };
    struct Access;

    [[nodiscard]] static std::int32_t index_of(Token token) noexcept {
        return static_cast<std::int32_t>(digest_index(token));
    }
    [[nodiscard]] std::int32_t find(const Digest& digest) const noexcept;  // kNil: none
    std::int32_t add(const Digest& digest);
    void drop(std::int32_t index);

    Journal* journal_;
    Slab<Record> records_;
    std::int32_t root_ = kNil;
    std::int64_t size_ = 0;
};

}  // namespace kvpool
