// Keys of blocks of KV, straight from tokens: every request of an engine begins with them, in Python as a hundred small steps.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "bindings/bindings.hpp"

#ifdef FARPOOL_OPENSSL
#include <openssl/evp.h>
#endif

namespace {

using Digest = std::array<unsigned char, 32>;

// The layout of `farpool.kv.keys`.
struct BlockKey {
    char magic[4] = {'f', 'p', 'k', '1'};
    unsigned char scope[16];
    unsigned char chain[32];
    std::uint32_t group;  // this and the next one big-endian
    std::uint32_t shard;
    std::uint32_t zero = 0;
};
static_assert(sizeof(BlockKey) == 64);

#ifdef FARPOOL_OPENSSL

// SHA-256 of OpenSSL, looked up once: that takes longer than hashing a block's tokens.
class Sha256 {
public:
    Sha256() : algorithm_(EVP_MD_fetch(nullptr, "SHA256", nullptr)), context_(EVP_MD_CTX_new()) {}
    ~Sha256() {
        EVP_MD_CTX_free(context_);
        EVP_MD_free(algorithm_);
    }
    Sha256(const Sha256&) = delete;
    Sha256& operator=(const Sha256&) = delete;

    bool digest(const void* first, std::size_t first_nbytes, const void* second, std::size_t second_nbytes, Digest& into) {
        return algorithm_ != nullptr && context_ != nullptr && EVP_DigestInit_ex2(context_, algorithm_, nullptr) == 1 &&
               EVP_DigestUpdate(context_, first, first_nbytes) == 1 && EVP_DigestUpdate(context_, second, second_nbytes) == 1 &&
               EVP_DigestFinal_ex(context_, into.data(), nullptr) == 1;
    }

private:
    EVP_MD* algorithm_;
    EVP_MD_CTX* context_;
};

// The hash of each page and all tokens before it; empty if a token is no whole number of 64 bits, or hashing fails.
std::optional<std::vector<Digest>> chain_of(PyObject* const* tokens, std::size_t pages, std::size_t page,
                                            const nb::bytes& prior) {
    static Sha256 sha256;  // guarded by the interpreter lock, which is held all the time
    std::vector<Digest> chain(pages);
    if (pages == 0) {
        return chain;
    }
    std::vector<std::uint64_t> wide(page);
    std::vector<std::uint32_t> narrow(page);
    std::vector<unsigned char> marked(1 + page * sizeof(std::uint64_t), 0xff);
    const void* before = prior.c_str();
    std::size_t before_nbytes = prior.size();
    for (std::size_t number = 0; number < pages; ++number) {
        bool is_narrow = true;
        for (std::size_t place = 0; place < page; ++place) {
            PyObject* const token = tokens[number * page + place];
            const unsigned long long value = PyLong_Check(token) != 0 ? PyLong_AsUnsignedLongLong(token) : 0;
            if (PyLong_Check(token) == 0 || PyErr_Occurred() != nullptr) {
                PyErr_Clear();
                return std::nullopt;
            }
            wide[place] = value;
            narrow[place] = static_cast<std::uint32_t>(value);
            is_narrow = is_narrow && value <= std::numeric_limits<std::uint32_t>::max();
        }
        const void* bytes = narrow.data();
        std::size_t nbytes = page * sizeof(std::uint32_t);
        if (!is_narrow) {
            std::memcpy(marked.data() + 1, wide.data(), page * sizeof(std::uint64_t));
            bytes = marked.data();
            nbytes = marked.size();
        }
        if (!sha256.digest(before, before_nbytes, bytes, nbytes, chain[number])) {
            return std::nullopt;
        }
        before = chain[number].data();
        before_nbytes = chain[number].size();
    }
    return chain;
}

#endif

// The keys of all whole pages of tokens, one group after the other; None if Python has to make them.
nb::object token_keys(const nb::object& tokens, std::size_t page, const nb::bytes& scope, std::uint32_t groups,
                      std::uint32_t shard, const nb::bytes& prior) {
#ifdef FARPOOL_OPENSSL
    BlockKey key{};
    if (page > 0 && scope.size() == sizeof key.scope && (PyList_Check(tokens.ptr()) != 0 || PyTuple_Check(tokens.ptr()) != 0)) {
        const auto pages = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(tokens.ptr())) / page;
        if (const auto chain = chain_of(PySequence_Fast_ITEMS(tokens.ptr()), pages, page, prior)) {
            std::memcpy(key.scope, scope.c_str(), sizeof key.scope);
            key.shard = __builtin_bswap32(shard);
            nb::list keys;
            for (std::uint32_t group = 0; group < groups; ++group) {
                key.group = __builtin_bswap32(group);
                for (const Digest& one : *chain) {
                    std::memcpy(key.chain, one.data(), one.size());
                    keys.append(nb::bytes(&key, sizeof key));
                }
            }
            return keys;
        }
    }
#endif
    return nb::none();
}

}  // namespace

void bind_kv(nb::module_& m) {
    m.def("token_keys", token_keys, nb::arg("tokens"), nb::arg("page"), nb::arg("namespace"), nb::arg("groups"),
          nb::arg("shard"), nb::arg("prior"),
          nb::sig("def token_keys(tokens: collections.abc.Sequence[int], page: int, namespace: bytes, groups: int, shard: int, "
                  "prior: bytes) -> list[bytes] | None"),
          R"(Compose the keys of all blocks of tokens, as `farpool.kv.keys` describes them, one group of layers after the other.

`prior` is hashed before the first block's tokens.

None if Python has to do it: tokens that are no list or tuple of whole numbers of 64 bits, or a build without OpenSSL.)");
}
