// Sums and maxima over the 256 threads of a group, in a fixed order: the same bits in every run.

var<workgroup> group_values: array<real, 256>;

fn group_sum(thread: u32, value: real) -> real {
    group_values[thread] = value;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (thread < half) {
            group_values[thread] += group_values[thread + half];
        }
        workgroupBarrier();
    }
    let total = group_values[0];
    workgroupBarrier();
    return total;
}

fn group_max(thread: u32, value: real) -> real {
    group_values[thread] = value;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (thread < half) {
            group_values[thread] = max(group_values[thread], group_values[thread + half]);
        }
        workgroupBarrier();
    }
    let top = group_values[0];
    workgroupBarrier();
    return top;
}
