// Where a thread is. A grid has two dimensions, since one ends at 65,535.
struct Place {
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,  // in its group
}

// The number of the thread's group.
fn block_of(place: Place) -> u32 { return place.group.y * place.grid.x + place.group.x; }

// The number of the thread among those of all groups of 256.
fn item_of(place: Place) -> u32 { return block_of(place) * 256 + place.thread; }
