// Barriers in shared memory, and the copies that count at them (sm_90). Needs common.cuh.

// Lets wgmma and TMA see what this thread wrote to shared memory.
__device__ __forceinline__ void shared_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier in shared memory, 8 bytes: a phase ends after `count` arrivals and as many bytes of TMA as were expected. The
// parity of a phase is 0, 1, 0, ...; a fresh barrier lets through who waits for parity 1, the phase before the first.
__device__ __forceinline__ void barrier_make(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// By the thread that made them, before __syncthreads: other threads and TMA see the barriers.
__device__ __forceinline__ void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    shared_fence();
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// By a thread that will arrive in the same phase, and later.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Whether the phase of this parity is over; the hardware may let some time pass before it says no.
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

// Starts a copy of bytes that lie side by side; both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void copy_line(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                     "r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// The same for what is read once: it is the first to leave the L2 cache.
__device__ __forceinline__ void copy_line_once(u32 to, const void *from, u32 bytes, u32 barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
