// Weights of one byte: int8 and e4m3 (tinyforge/quantised.py has the formats). Every code is exact as a bf16.

struct int8 {
    signed char bits;
};
struct e4m3 {
    unsigned char bits;
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
