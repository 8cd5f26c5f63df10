#include "kvpool/core/sha256.hpp"

#include <string>

#include "kvpool/core/errors.hpp"

#ifdef KVPOOL_STATIC_LIBCRYPTO
#include <openssl/evp.h>
#else
#include <dlfcn.h>
#endif

namespace kvpool {
namespace {

[[noreturn]] void fail(const char* what) { throw Error(std::string("OpenSSL: ") + what + " failed"); }

#ifdef KVPOOL_STATIC_LIBCRYPTO

// The algorithm, fetched once: a look-up by name takes longer than a block's hash.
EVP_MD* algorithm() {
    static EVP_MD* const fetched = EVP_MD_fetch(nullptr, "SHA256", nullptr);  // freed with the process
    return fetched != nullptr ? fetched : throw Error("OpenSSL: EVP_MD_fetch failed");
}

bool hash(std::span<const std::byte> bytes, Digest& out) {
    return EVP_Digest(bytes.data(), bytes.size(), out.data(), nullptr, algorithm(), nullptr) == 1;
}

#else

// The three functions of libcrypto.so.3 that are needed, and the algorithm.
struct Libcrypto {
    int (*digest)(const void*, std::size_t, unsigned char*, unsigned int*, const void*, void*) = nullptr;
    void* algorithm = nullptr;

    Libcrypto() {
        void* const library = ::dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);  // stays: the process may exit with it
        if (library == nullptr) {
            throw UnsupportedError("block keys need OpenSSL's libcrypto.so.3, which was not found; install OpenSSL 3");
        }
        using Fetch = void* (*)(void*, const char*, const char*);
        const auto fetch = reinterpret_cast<Fetch>(::dlsym(library, "EVP_MD_fetch"));
        digest = reinterpret_cast<decltype(digest)>(::dlsym(library, "EVP_Digest"));
        algorithm = fetch != nullptr ? fetch(nullptr, "SHA256", nullptr) : nullptr;
        if (digest == nullptr || algorithm == nullptr) {
            fail("EVP_MD_fetch");
        }
    }
};

bool hash(std::span<const std::byte> bytes, Digest& out) {
    static const Libcrypto library;  // tried again next time if it throws
    return library.digest(bytes.data(), bytes.size(), out.data(), nullptr, library.algorithm, nullptr) == 1;
}

#endif

}  // namespace

Digest sha256(std::span<const std::byte> bytes) {
    Digest digest{};
    if (!hash(bytes, digest)) {
        fail("EVP_Digest");
    }
    return digest;
}

}  // namespace kvpool
