// Conversion to FP8: e4m3, 4 bits of exponent and 3 of mantissa, up to 448, and e5m2, up to 57,344. Rounds to nearest,
// ties to even, and saturates. Needs common.cuh, included before it, and sm_89 or newer. ops/fp8.py says what is
// quantised, and how it is scaled.

#define E4M3_LARGEST 448.0f

typedef unsigned char byte;

// Two numbers, the first in the lower half.
__device__ __forceinline__ unsigned short two_e4m3(float x, float y) {
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(y), "f"(x));
    return two;
}
__device__ __forceinline__ unsigned short two_e5m2(float x, float y) {
    unsigned short two;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(y), "f"(x));
    return two;
}

// The scale of numbers up to `most`. NaN and infinity are not lost: the scale is then NaN or infinite, and so is each
// product with it.
__device__ __forceinline__ float scale_of(float most) { return most == 0 ? 1.0f : most / E4M3_LARGEST; }

// N numbers times `factor`, in e4m3 or else e5m2.
template <bool IS_E4M3, int N, class T>
__device__ __forceinline__ Pack<byte, N> bytes_of(const Pack<T, N> &x, float factor) {
    Pack<byte, N> found;
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        const float first = float(widen(x.v[j])) * factor;
        const float second = j + 1 < N ? float(widen(x.v[j + 1 < N ? j + 1 : j])) * factor : 0.0f;
        const unsigned short two = IS_E4M3 ? two_e4m3(first, second) : two_e5m2(first, second);
        found.v[j] = two & 0xff;
        if (j + 1 < N) found.v[j + 1 < N ? j + 1 : j] = two >> 8;
    }
    return found;
}
