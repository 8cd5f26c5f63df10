#include <gtest/gtest.h>

#include <string_view>

TEST(Version, ComesFromTheBuild) { EXPECT_FALSE(std::string_view{KVPOOL_VERSION}.empty()); }
