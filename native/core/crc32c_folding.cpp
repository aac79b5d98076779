// The method is described in Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"
// (Intel, 2009). A message is a polynomial over GF(2), and only its remainder modulo P matters. So 128 bits that stand n
// bits before others may be multiplied by x^n mod P and added to the others. Four accumulators run side by side, because a
// multiplication takes several cycles but one can start each cycle. At the end, one accumulator has the remainder of the whole
// message, and the crc32 instruction reduces it.
//
// Vectors of 128 bits are left out: a turn of four is slower than the three streams of crc32c.cpp (on an AMD EPYC 6 to 9
// against 10 to 15 GB/s; vectors of 256 bits make 12 to 19 there, and twice as much as the streams if they also copy).
#include "core/crc32c_folding.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#define FARPOOL_WIDE_TARGET __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))
#define FARPOOL_NARROW_TARGET __attribute__((target("avx2,vpclmulqdq,pclmul,sse4.2")))

namespace farpool {

namespace {

constexpr std::size_t accumulators = 4;
constexpr std::size_t wide_bytes = 64;
constexpr std::size_t narrow_bytes = 32;
static_assert(accumulators * wide_bytes <= folding_least && folding_step % wide_bytes == 0);
static_assert(wide_bytes % narrow_bytes == 0);

// x^exponent mod P: bit 31 stands for x^0.
constexpr std::uint64_t power_of_x(std::size_t exponent) {
    std::uint32_t power = 0x80000000u;
    for (; exponent > 0; --exponent) {
        power = (power & 1u) != 0 ? (power >> 1) ^ crc32c_polynomial : power >> 1;
    }
    return power;
}

// Factors by which the halves of 128 bits are multiplied to move them back by `nbytes`. Bits are reflected: the lower half
// stands 64 bits before the upper one. The product of two 64-bit operands has 127 bits, so it is one bit too far ahead in
// 128: hence the exponents are one less.
template <std::size_t nbytes>
constexpr std::uint64_t lower_power = power_of_x(8 * nbytes + 64 - 1) << 32;
template <std::size_t nbytes>
constexpr std::uint64_t upper_power = power_of_x(8 * nbytes - 1) << 32;

// Adds `ahead` to `behind`, which begins `nbytes` later in the message.
template <std::size_t nbytes>
FARPOOL_WIDE_TARGET inline __m512i fold_onto(__m512i ahead, __m512i behind) {
    constexpr std::uint64_t lower = lower_power<nbytes>;
    constexpr std::uint64_t upper = upper_power<nbytes>;
    const __m512i powers = _mm512_set4_epi64(upper, lower, upper, lower);
    constexpr int exclusive_or_of_three = 0x96;
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(ahead, powers, 0x00),
                                     _mm512_clmulepi64_epi128(ahead, powers, 0x11), behind, exclusive_or_of_three);
}

template <std::size_t nbytes>
FARPOOL_NARROW_TARGET inline __m256i fold_onto(__m256i ahead, __m256i behind) {
    constexpr std::uint64_t lower = lower_power<nbytes>;
    constexpr std::uint64_t upper = upper_power<nbytes>;
    const __m256i powers = _mm256_set_epi64x(upper, lower, upper, lower);
    const __m256i product =
        _mm256_xor_si256(_mm256_clmulepi64_epi128(ahead, powers, 0x00), _mm256_clmulepi64_epi128(ahead, powers, 0x11));
    return _mm256_xor_si256(product, behind);
}

// Both `take_` functions: another process may change `from`, so the compiler must keep the loaded bytes and not load them
// again.
template <bool copies>
FARPOOL_WIDE_TARGET inline __m512i take_wide(unsigned char* to, const unsigned char* from, std::size_t offset) {
    __m512i vector = _mm512_loadu_si512(from + offset);
    if constexpr (copies) {
        asm("" : "+v"(vector));
        _mm512_storeu_si512(to + offset, vector);
    }
    return vector;
}

template <bool copies>
FARPOOL_NARROW_TARGET inline __m256i take_narrow(unsigned char* to, const unsigned char* from, std::size_t offset) {
    __m256i vector = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + offset));
    if constexpr (copies) {
        asm("" : "+x"(vector));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + offset), vector);
    }
    return vector;
}

__attribute__((target("sse4.2"))) std::uint32_t remainder_of(std::span<const std::uint64_t> words) {
    std::uint64_t remainder = 0;
    for (const std::uint64_t word : words) {
        remainder = _mm_crc32_u64(remainder, word);
    }
    return static_cast<std::uint32_t>(remainder);
}

template <bool copies>
FARPOOL_WIDE_TARGET std::uint32_t fold_wide(std::uint32_t crc, unsigned char* to, const unsigned char* from,
                                            std::size_t nbytes) noexcept {
    constexpr std::size_t turn = accumulators * wide_bytes;
    __m512i sums[accumulators];
    for (std::size_t i = 0; i < accumulators; ++i) {
        sums[i] = take_wide<copies>(to, from, i * wide_bytes);
    }
    sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
    std::size_t offset = turn;
    for (; nbytes - offset >= turn; offset += turn) {
        for (std::size_t i = 0; i < accumulators; ++i) {
            sums[i] = fold_onto<turn>(sums[i], take_wide<copies>(to, from, offset + i * wide_bytes));
        }
    }
    __m512i sum = sums[0];
    for (std::size_t i = 1; i < accumulators; ++i) {
        sum = fold_onto<wide_bytes>(sum, sums[i]);
    }
    for (; offset < nbytes; offset += wide_bytes) {
        sum = fold_onto<wide_bytes>(sum, take_wide<copies>(to, from, offset));
    }
    alignas(wide_bytes) std::uint64_t words[wide_bytes / 8];
    _mm512_store_si512(words, sum);
    return remainder_of(words);
}

template <bool copies>
FARPOOL_NARROW_TARGET std::uint32_t fold_narrow(std::uint32_t crc, unsigned char* to, const unsigned char* from,
                                                std::size_t nbytes) noexcept {
    constexpr std::size_t turn = accumulators * narrow_bytes;
    __m256i sums[accumulators];
    for (std::size_t i = 0; i < accumulators; ++i) {
        sums[i] = take_narrow<copies>(to, from, i * narrow_bytes);
    }
    sums[0] = _mm256_xor_si256(sums[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(crc))));
    std::size_t offset = turn;
    for (; nbytes - offset >= turn; offset += turn) {
        for (std::size_t i = 0; i < accumulators; ++i) {
            sums[i] = fold_onto<turn>(sums[i], take_narrow<copies>(to, from, offset + i * narrow_bytes));
        }
    }
    __m256i sum = sums[0];
    for (std::size_t i = 1; i < accumulators; ++i) {
        sum = fold_onto<narrow_bytes>(sum, sums[i]);
    }
    for (; offset < nbytes; offset += narrow_bytes) {
        sum = fold_onto<narrow_bytes>(sum, take_narrow<copies>(to, from, offset));
    }
    alignas(narrow_bytes) std::uint64_t words[narrow_bytes / 8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), sum);
    return remainder_of(words);
}

template <auto fold>
std::uint32_t without_copy(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) noexcept {
    return fold(crc, nullptr, data, nbytes);
}

constexpr Folding all[] = {
    {"avx512", without_copy<fold_wide<false>>, fold_wide<true>},
    {"avx2", without_copy<fold_narrow<false>>, fold_narrow<true>},
};

}  // namespace

std::span<const Folding> foldings() noexcept {
    const bool narrow = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0 &&
                        __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.2") != 0;
    const bool wide = narrow && __builtin_cpu_supports("avx512f") != 0;
    return std::span(all).subspan(wide ? 0 : narrow ? 1 : 2);
}

}  // namespace farpool

#else

std::span<const farpool::Folding> farpool::foldings() noexcept { return {}; }

#endif
