// Rows of a table by id, and the sum of gradients over equal ids.

struct Sizes { count: u32, width: u32, length: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> y: array<real>;
@group(0) @binding(2) var<storage, read> table: array<real>;
@group(0) @binding(3) var<storage, read> ids: array<i32>;
@group(0) @binding(4) var<storage, read> x: array<real>;

override ADD: bool = false;  // y = x + the row, for positions
override RESTART: bool = false;  // ids say which row; without, row t of every sequence of `length`

@compute @workgroup_size(256)
fn embedding_fwd(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let token = i / sizes.width;
    var row = token % sizes.length;
    if (RESTART) {
        row = u32(ids[token]);
    }
    var value = table[row * sizes.width + i % sizes.width];
    if (ADD) {
        value += x[i];
    }
    y[i] = value;
}

@group(0) @binding(5) var<storage, read_write> dtable: array<real>;
@group(0) @binding(6) var<storage, read> dy: array<real>;
@group(0) @binding(7) var<storage, read> order: array<i32>;   // tokens, sorted by id
@group(0) @binding(8) var<storage, read> starts: array<i32>;  // where in `order` each id begins, and the end
@group(0) @binding(9) var<storage, read> rows: array<i32>;    // the ids

// A thread per column of an id that occurs: it adds the gradients of its tokens in their order.
@compute @workgroup_size(256)
fn embedding_bwd(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let which = i / sizes.width;
    let column = i % sizes.width;
    var sum: real = 0.0;
    for (var k = starts[which]; k < starts[which + 1]; k++) {
        sum += dy[u32(order[k]) * sizes.width + column];
    }
    dtable[u32(rows[which]) * sizes.width + column] += sum;
}
