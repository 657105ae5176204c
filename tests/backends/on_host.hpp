// Runs the text of a kernel on the host, to see that it computes what it should: every thread of a block is a coroutine,
// and where threads wait for each other it hands over to the next. What has no meaning here (spaces of memory, hints)
// is defined away; instructions that are written in PTX have stand-ins that do the same to `host_shared`.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <ucontext.h>
#include <utility>
#include <vector>

#undef INFINITY
#undef NAN
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define INFINITY HUGE_VALF
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
using std::abs;
using std::max;
using std::min;

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Index { int x = 0, y = 0, z = 0; };
static Index threadIdx, blockIdx, blockDim, gridDim;
alignas(1024) static unsigned char host_shared[232448];

// --- coroutines

static std::vector<ucontext_t> contexts;
static std::vector<char> done;
static ucontext_t scheduler;
static int current;
static long long turns;
static void host_yield() {
    const int me = current;
    swapcontext(&contexts[me], &scheduler);
    current = me, threadIdx.x = me;
}
static std::function<void()> host_work;
static void host_entry() {
    host_work();
    done[current] = 1;
    swapcontext(&contexts[current], &scheduler);
}
// A block of `threads`; aborts where they wait for ever.
static void host_block(int threads, std::function<void()> work) {
    static std::vector<std::vector<char>> stacks;
    contexts.assign(threads, {}), done.assign(threads, 0), stacks.resize(threads);
    host_work = work;
    for (int i = 0; i < threads; i++) {
        stacks[i].resize(1 << 16);
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks[i].data(), contexts[i].uc_stack.ss_size = stacks[i].size();
        contexts[i].uc_link = &scheduler;
        makecontext(&contexts[i], host_entry, 0);
    }
    turns = 0;
    for (bool any = true; any; ) {
        any = false;
        for (int i = 0; i < threads; i++) {
            if (done[i]) continue;
            any = true, current = i, threadIdx.x = i;
            swapcontext(&scheduler, &contexts[i]);
        }
        if (++turns > 20000000) { printf("threads wait for ever\n"); exit(1); }
    }
}
template <class Kernel> static void host_launch(int grid_x, int grid_y, int threads, Kernel kernel) {
    gridDim.x = grid_x, gridDim.y = grid_y, blockDim.x = threads;
    for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++) {
            memset(host_shared, 0xff, sizeof host_shared);  // NaN
            host_block(threads, kernel);
        }
}

// --- waiting for others

struct Meeting {
    int arrived = 0, round = 0;
    void wait(int all) {
        const int mine = round;
        if (++arrived == all) arrived = 0, round++;
        while (round == mine) host_yield();
    }
};
static Meeting whole_block, warps[32];
static unsigned long long exchanged[32][32];
inline void __syncthreads() { whole_block.wait(blockDim.x); }
template <class V> static V host_from(V value, int lane) {
    static_assert(sizeof(V) <= 8, "");
    const int warp = threadIdx.x / 32, from = (lane + 32) % 32;
    memcpy(&exchanged[warp][threadIdx.x % 32], &value, sizeof value);
    warps[warp].wait(32);
    V found;
    memcpy(&found, &exchanged[warp][from], sizeof found);
    warps[warp].wait(32);
    return found;
}
template <class V> static V __shfl_sync(unsigned, V v, int lane) { return host_from(v, lane); }
template <class V> static V __shfl_xor_sync(unsigned, V v, int gap) { return host_from(v, threadIdx.x % 32 ^ gap); }
template <class V> static V __shfl_up_sync(unsigned, V v, int gap) {
    const int lane = threadIdx.x % 32;
    return host_from(v, lane < gap ? lane : lane - gap);
}
template <class V> static V __shfl_down_sync(unsigned, V v, int gap) {
    const int lane = threadIdx.x % 32;
    return host_from(v, lane + gap > 31 ? lane : lane + gap);
}
template <class V> static V atomicAdd(V *to, V x) { return std::exchange(*to, *to + x); }
inline void __nanosleep(unsigned) { host_yield(); }
inline void __trap() { printf("trap\n"), exit(1); }
static unsigned __ballot_sync(unsigned, bool yes) {
    unsigned votes = 0;
    for (int i = 0; i < 32; i++) votes |= unsigned(host_from(int(yes), i)) << i;
    return votes;
}
inline int __ffs(unsigned x) { return __builtin_ffs(x); }

// --- arithmetic

inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
template <class V> static void __stcs(V *to, const V &x) { *to = x; }
template <class V> static V __ldcg(const V *from) { return *from; }
inline unsigned __cvta_generic_to_shared(const void *p) { return unsigned((const unsigned char *)p - host_shared); }
inline unsigned short host_bf16(float x) {  // to nearest, ties to even
    unsigned bits;
    memcpy(&bits, &x, 4);
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static std::mt19937 host_random(7);
static double host_normal() { static std::normal_distribution<double> d; return d(host_random); }
