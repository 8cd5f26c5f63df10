#include "kvpool/reuse/keys.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvpool/core/sha256.hpp"

namespace kvpool {
namespace {

std::string hex(const BlockKey& key) {
    constexpr const char* kDigits = "0123456789abcdef";
    std::string text;
    for (const std::uint8_t byte : key) {
        text += kDigits[byte >> 4];
        text += kDigits[byte & 15];
    }
    return text;
}

TEST(Sha256, KnownVectors) {
    EXPECT_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    const std::string abc = "abc";
    EXPECT_EQ(hex(sha256(std::as_bytes(std::span(abc)))),
              "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Keys, RootsOfScopes) {
    EXPECT_EQ(hex(root_key({})), "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d");
    EXPECT_EQ(hex(root_key({.lora_id = 0, .salt = {}})),
              "a536aa3cede6ea3c1f3e0357c3c60e0f216a8c89b853df13b29daa8f85065dfb");
    EXPECT_EQ(hex(root_key({.lora_id = {}, .salt = 0})),
              "4322fd2bc0a137d1375b37b3b2e2b4715b3d3dd7ca9682438d4fea0f8437fad3");
    EXPECT_EQ(hex(root_key({.lora_id = 0, .salt = 0})),
              "6ad36d3f69c5684bd1021eeb3a8038250f424dca6d96600d2a7d22101dbd436d");
    EXPECT_EQ(hex(root_key({.lora_id = 7, .salt = 11})),
              "9e22dbfea623bd030eb7ae4a0d71a7a6beb3cbf25797bcc31ddd0acc5513d3a3");
}

TEST(Keys, ChainsOfBlocks) {
    Journal journal;
    DigestPool pool(journal);
    journal.begin();
    const auto key = [&](const BlockKey& parent, const std::vector<Token>& tokens) {
        return block_key(parent, Query::encoded(tokens), pool);
    };
    const BlockKey root = root_key({});
    const BlockKey block0 = key(root, {0, 1, 2, 3});
    EXPECT_EQ(hex(block0), "7b894451a88bc03088bd0c44f01139922b089a1ab691d157c273185c78ca83b2");
    EXPECT_EQ(hex(key(block0, {4, 5, 6, 7})), "181684b4f09a9fc1689624a565bc5c9ed96cede3e0863cf373463b1a93c45369");
    EXPECT_EQ(hex(key(root, {0, 1, 2})), "56eed4fa2eec503f99466829bafed63846694c71a5cfaf3c836c4efcbd3019db");
    EXPECT_EQ(hex(key(root_key({.lora_id = 7, .salt = 11}), {1, 2})),
              "8d400728573c8ff046b41442cda1eb96291533fc6017407b75980fd6b0bf30b8");

    Digest counting{};
    for (std::size_t i = 0; i < counting.size(); ++i) {
        counting[i] = static_cast<std::uint8_t>(i);
    }
    const std::vector<Token> ids{0, -1, 1001, 1002};
    const std::vector<Digest> digests{counting};
    const std::string expected = "0a1bfd6dcecbe284b01933df8f0e6600aa220ad7dea7c26ac4519ffc274417aa";
    std::vector<Token> scratch;
    EXPECT_EQ(hex(block_key(root, pool.encode(ids, digests, "t", scratch), pool)), expected);  // unknown to the pool
    std::vector<Token> stored(4);
    pool.intern(ids, digests, stored.data());
    EXPECT_EQ(hex(key(root, stored)), expected);
}

TEST(Keys, ScopesAreOrderedNoneFirst) {
    const std::vector<ReuseScope> ordered{{}, {{}, 0}, {{}, 5}, {0, {}}, {0, 0}, {3, {}}, {0xFFFFFFFFFFFFFFFF, 1}};
    for (std::size_t i = 0; i < ordered.size(); ++i) {
        for (std::size_t j = 0; j < ordered.size(); ++j) {
            EXPECT_EQ(ordered[i] < ordered[j], i < j);
        }
    }
}

}  // namespace
}  // namespace kvpool
