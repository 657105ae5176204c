// Numbers of 8 bits: e4m3, 4 bits of exponent and 3 of mantissa, up to 448, and e5m2, up to 57,344. Rounded to nearest,
// ties to even; what is too large becomes the largest. Needs common.cuh, pasted in before it, and sm_89 or newer. Who
// uses it: fp8.cu, rmsnorm.cu, gemm_hopper.cu. ops/fp8.py says what is rounded, and how it is scaled.

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

// What numbers up to `most` are divided by, and what they are multiplied with instead. Not a number, and infinity, stay:
// the product with one of the two is not finite.
__device__ __forceinline__ float scale_of(float most) { return most == 0 ? 1.0f : most / E4M3_LARGEST; }

// N numbers times `factor`, in e4m3 or e5m2.
template <bool FINE, int N, class T>
__device__ __forceinline__ Pack<byte, N> bytes_of(const Pack<T, N> &x, float factor) {
    Pack<byte, N> found;
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        const float first = float(widen(x.v[j])) * factor, second = j + 1 < N ? float(widen(x.v[j + 1 < N ? j + 1 : j])) * factor : 0.0f;
        const unsigned short two = FINE ? two_e4m3(first, second) : two_e5m2(first, second);
        found.v[j] = two & 0xff;
        if (j + 1 < N) found.v[j + 1 < N ? j + 1 : j] = two >> 8;
    }
    return found;
}
