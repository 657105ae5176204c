// Weights of one byte: int8 and e4m3 (tinyforge/quantised.py has the formats). Every code is exact as a bf16. And codes of
// four bits in groups of 32 numbers with a scale (quantised_groups.py).

struct int8 {
    signed char bits;
};
struct e4m3 {
    unsigned char bits;
};
struct four_bits {
    unsigned char two;
};

__device__ __forceinline__ float widen(int8 x) { return x.bits; }
__device__ __forceinline__ float widen(e4m3 x) {
    const int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
    // 2^(exponent - 7) (1 + mantissa / 8); where the exponent is 0 the 1 is taken off again, of 2^-6.
    float size = __int_as_float((max(exponent, 1) + 120) << 23 | mantissa << 20);
    if (exponent == 0) size -= 0.015625f;
    return x.bits & 128 ? -size : size;
}

// a b + c of two numbers in each register, in bf16.
__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Bytes 2 i and 2 i + 1 of a word as two numbers of bf16.
template <int i>
__device__ __forceinline__ u32 decode_pair(u32 word, int8) {
    const u32 bytes = __byte_perm(word, 0, i ? 0x4342 : 0x4140);
    // Seven bits of mantissa behind 128 are 128 + the lower bits; the sign stands for -128 more: 256 is taken off.
    const u32 low = (bytes & 0x007F007F) | 0x43004300, off = (bytes & 0x00800080) | 0x43004300;
    return fma_pair(off, 0xBF80BF80, low);
}
template <int i>
__device__ __forceinline__ u32 decode_pair(u32 word, e4m3) {
    const u32 bytes = __byte_perm(word, 0, i ? 0x3424 : 0x1404);
    // Exponent and mantissa in the places of a bf16's, whose exponent counts from -127 and not from -7: times 2^120.
    const u32 small = (bytes & 0x80008000) | (bytes >> 4 & 0x07F007F0);
    return fma_pair(small, 0x7B807B80, 0x80008000);
}

// Weights as they are stored, codes or not, as numbers of T.
template <class T, class Code, int N>
__device__ __forceinline__ decltype(auto) decoded(const Pack<Code, N> &stored) {
    if constexpr (sizeof(Code) == sizeof(T)) {
        return (stored);  // itself
    } else {
        Pack<T, N> numbers;
        if constexpr (sizeof(T) == 2 && N == 8) {
            const uint2 words = reinterpret_cast<const uint2 &>(stored);
            uint4 &pairs = reinterpret_cast<uint4 &>(numbers);
            pairs.x = decode_pair<0>(words.x, Code()), pairs.y = decode_pair<1>(words.x, Code());
            pairs.z = decode_pair<0>(words.y, Code()), pairs.w = decode_pair<1>(words.y, Code());
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) narrow(widen(stored.v[i]), numbers.v[i]);
        }
        return numbers;
    }
}

template <class T, int N>
__device__ Pack<T, 8> decoded(const Pack<four_bits, N> &stored);  // never called: these have scales among them

// Codes of four bits as bf16, in two instructions and a half for four of them. The bits of a code in the lowest places of
// a half-word are a subnormal number, code * 2^-133, and four places higher one of 16 times the size: up to there bf16
// is linear in its bits. So a mask is the conversion, and the input of the product is made large in return: tensor cores
// take subnormal numbers as they are.
struct Codes {
    u32 low[2], high[2];  // the pairs in places 0, 8 and 4, 12 of both half-words
    __device__ explicit Codes(u32 word)
        : low{word & 0x000F000F, word >> 8 & 0x000F000F}, high{word & 0x00F000F0, word >> 8 & 0x00F000F0} {}
};
constexpr u32 EIGHT_OFF = 0x80088008, EIGHT_OFF_HIGH = 0x80808080;  // -8 in the same units: codes count from -8
constexpr float LOW_UNIT = 8589934592.0f, HIGH_UNIT = 536870912.0f;  // 2^33, 2^29: of sums, the input being larger by 2^100
__device__ __forceinline__ u32 enlarged(u32 two) { return fma_pair(two, 0x71807180, 0x80008000); }

// Number `i` of two of half precision.
__device__ __forceinline__ float half_of(u32 two, int i) {
    float low, high;
    asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;}"
        : "=f"(low), "=f"(high)
        : "r"(two));
    return i ? high : low;
}
