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
#define __cluster_dims__(...)
#define __align__(n) alignas(n)
using std::abs;
using std::max;
using std::min;

struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Index { int x = 0, y = 0, z = 0; };
static Index threadIdx, blockIdx, blockDim, gridDim;
constexpr int HOST_ROOM = 232448, HOST_BLOCKS = 8;  // shared memory of a block; blocks that a test may have
alignas(1024) static unsigned char host_shared[HOST_BLOCKS * HOST_ROOM];

// --- coroutines

static std::vector<ucontext_t> contexts;
static std::vector<char> done;
static ucontext_t scheduler;
static int current, first_block, host_threads;  // of a block
static long long turns, host_limit = 20000000;
static bool host_jitter = false;          // warps fall behind each other at random
static std::function<void()> host_tick;   // what goes on beside the threads
static std::mt19937 host_random(7);
static int host_rank() { return current / host_threads; }
static unsigned char *host_at(unsigned address) { return host_shared + host_rank() * HOST_ROOM + address; }
static void host_resume(int i) {
    current = i, threadIdx.x = i % blockDim.x, threadIdx.y = i % host_threads / blockDim.x;
    blockIdx.x = first_block + i / host_threads;
}
static void host_yield() {
    const int me = current;
    swapcontext(&contexts[me], &scheduler);
    host_resume(me);
}
static std::function<void()> host_work;
static void host_entry() {
    host_work();
    done[current] = 1;
    swapcontext(&contexts[current], &scheduler);
}
// The threads of a block, or of the blocks of a cluster; aborts where they wait for ever.
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
        bool late = false;
        for (int i = 0; i < threads; i++) {
            if (i % 32 == 0) late = host_jitter && host_random() % 4 == 0;
            if (done[i]) continue;
            any = true;
            if (late) continue;
            host_resume(i);
            swapcontext(&scheduler, &contexts[i]);
        }
        if (host_tick) host_tick();
        if (++turns > host_limit) { printf("threads wait for ever\n"); exit(1); }
    }
}
// down: the block's second axis.
template <class Kernel>
static void host_launch(int grid_x, int grid_y, int across, Kernel kernel, int cluster = 1, int down = 1) {
    const int threads = host_threads = across * down;
    gridDim.x = grid_x, gridDim.y = grid_y, blockDim.x = across, blockDim.y = down;
    for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
        for (first_block = 0; first_block < grid_x; first_block += cluster) {
            memset(host_shared, 0xff, sizeof host_shared);  // NaN
            host_block(threads * cluster, kernel);
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
static Meeting whole_block[HOST_BLOCKS], warps[64], some_lanes[64];
static unsigned long long exchanged[64][32];
inline void __syncthreads() { whole_block[host_rank()].wait(host_threads); }
inline void __threadfence() {}
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
template <class V> static V host_from(V value, int lane) {
    static_assert(sizeof(V) <= 8, "");
    const int warp = current / 32, from = (lane + 32) % 32;
    memcpy(&exchanged[warp][threadIdx.x % 32], &value, sizeof value);
    warps[warp].wait(32);
    V found;
    memcpy(&found, &exchanged[warp][from], sizeof found);
    warps[warp].wait(32);
    return found;
}
template <class V> static V __shfl_sync(unsigned, V v, int lane) { return host_from(v, lane); }
template <class V> static V __shfl_xor_sync(unsigned, V v, int gap) { return host_from(v, threadIdx.x % 32 ^ gap); }
inline bool __any_sync(unsigned, bool yes) {
    const int warp = current / 32;
    exchanged[warp][threadIdx.x % 32] = yes;
    warps[warp].wait(32);
    bool any = false;
    for (auto vote : exchanged[warp]) any |= vote != 0;
    warps[warp].wait(32);
    return any;
}
inline bool __all_sync(unsigned all, bool yes) { return !__any_sync(all, !yes); }
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
inline void __syncwarp() { warps[current / 32].wait(32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline void __syncwarp(unsigned mask) { some_lanes[current / 32].wait(__popc(mask)); }
inline unsigned __match_any_sync(unsigned mask, int value) {
    auto &all = exchanged[current / 32];
    all[threadIdx.x % 32] = value;
    __syncwarp(mask);
    unsigned equal = 0;
    for (int i = 0; i < 32; i++) equal |= (mask >> i & 1 && int(all[i]) == value) << i;
    __syncwarp(mask);
    return equal;
}
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = a | (unsigned long long)(b) << 32;
    unsigned found = 0;
    for (int i = 0; i < 4; i++) found |= (both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return found;
}

// ldmatrix: lane l passes the address of row l % 8 of matrix l / 8, and gets two numbers of each matrix.
static unsigned host_rows[64][32];
template <class F> static void host_load_matrix(unsigned (&x)[4], unsigned from, F at) {
    const int warp = current / 32, lane = threadIdx.x % 32;
    host_rows[warp][lane] = from;
    warps[warp].wait(32);
    for (int i = 0; i < 4; i++) {
        unsigned short pair[2];
        for (int e = 0; e < 2; e++) {
            const auto [row, column] = at(lane, e);
            memcpy(&pair[e], host_at(host_rows[warp][i * 8 + row] + column * 2), 2);
        }
        memcpy(&x[i], pair, 4);
    }
    warps[warp].wait(32);
}
static void host_load_matrix(unsigned (&x)[4], unsigned from) {
    host_load_matrix(x, from, [](int lane, int e) { return std::pair<int, int>(lane / 4, lane % 4 * 2 + e); });
}
static void host_load_matrix_transposed(unsigned (&x)[4], unsigned from) {
    host_load_matrix(x, from, [](int lane, int e) { return std::pair<int, int>(lane % 4 * 2 + e, lane / 4); });
}

// The larger of two errors, and NaN for ever where one was: what was never written is NaN.
static double host_worse(double worst, double error) { return error <= worst || std::isnan(worst) ? worst : error; }

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
static double host_normal() { static std::normal_distribution<double> d; return d(host_random); }

// What a test has written for `main`, piece by piece.
inline FILE *host_file;
template <class X> std::vector<X> host_taken(int count) {
    std::vector<X> found(count);
    if (fread(found.data(), sizeof(X), count, host_file) != size_t(count)) printf("the file is too short\n"), exit(1);
    return found;
}
