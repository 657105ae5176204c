// Barriers in shared memory (mbarrier), the copies that count at them, and registers handed from one warpgroup to
// another (sm_90). Needs common.cuh.

// Every warpgroup of a kernel starts with the same number of registers. One that copies needs few, and gives the others
// up to those that multiply. N: a multiple of 8. By all threads of the warpgroup.
template <int N>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Makes what this thread wrote to shared memory visible to wgmma and TMA.
__device__ __forceinline__ void shared_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier has 8 bytes. A phase ends after `count` arrivals, and as many bytes of TMA as were expected. The parities
// of phases are 0, 1, 0, ...; a wait for parity 1, the phase before the first, passes a fresh barrier.
__device__ __forceinline__ void barrier_make(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// By the thread that made them, before __syncthreads: makes the barriers visible to other threads and to TMA.
__device__ __forceinline__ void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    shared_fence();
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Adds to the bytes that the current phase waits for. By a thread that has yet to arrive in this phase.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Whether the phase of this parity is over. The hardware may wait for some time before it returns false.
__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    while (!barrier_passed(barrier, parity)) continue;
}

// Starts a copy of contiguous bytes; both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void copy_line(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                     "r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// A cache policy for data that is read once: its lines are evicted from the L2 cache first.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy_line_once(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(evict_first())
        : "memory");
}
