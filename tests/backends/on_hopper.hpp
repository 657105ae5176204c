// hopper.cuh's instructions and cp.async on the host. What is asynchronous happens late, at a time that is drawn, and no
// earlier than it must: a copy when it is waited for, a box of TMA some turns after its start, a product when it is
// waited for. A buffer that is read before it is full, or filled again before it is read, gives wrong numbers.

typedef unsigned int u32;
typedef unsigned long long u64;

static void host_fault(const char *what) {
    printf("%s\n", what);
    exit(1);
}

// --- barriers in shared memory

struct Barrier {
    int count, pending, bytes;
    u32 phase;
};
static Barrier host_barriers[HOST_BLOCKS][64];
static Barrier &host_barrier(u32 at, int rank = host_rank()) { return host_barriers[rank][at / 8 % 64]; }
static void host_check(Barrier &b) {
    if (b.pending < 0) host_fault("a barrier has more arrivals than it was made for");
    if (!b.pending && !b.bytes) b.pending = b.count, b.phase ^= 1;
}
static void host_arrive(u32 at, int rank = host_rank()) {
    Barrier &b = host_barrier(at, rank);
    b.pending--;
    host_check(b);
}

// --- cp.async

struct Copy { u32 to; const void *from; bool valid; int bytes; };
static std::vector<std::vector<Copy>> host_copies[1024];
static void host_commit() { host_copies[current].emplace_back(); }
static void host_copy(u32 to, const void *from, bool valid, int bytes = 16) {
    auto &groups = host_copies[current];
    if (groups.empty()) host_commit();
    groups.back().push_back({to, from, valid, bytes});
}
static void host_wait(int pending) {  // the last group is the one that is open
    auto &groups = host_copies[current];
    while (int(groups.size()) > pending + 1) {
        for (const Copy &c : groups[0]) {
            if (c.valid) memcpy(host_at(c.to), c.from, c.bytes);
            else memset(host_at(c.to), 0, c.bytes);
        }
        groups.erase(groups.begin());
    }
}

// --- TMA. A map: address, sizes of the three axes, columns and lines of a box, distance of lines.

static u32 host_swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
struct Box {
    u32 to, barrier;
    const u64 *map;
    int x, y, z, rank;
    unsigned due;
};
static std::vector<Box> host_boxes;
static void host_box(u32 to, const u64 *map, int x, int y, int z, u32 barrier, unsigned blocks = 1u << host_rank()) {
    if (to % 128) host_fault("a box begins inside a line");
    for (int rank = 0; rank < HOST_BLOCKS; rank++)
        if (blocks >> rank & 1) host_boxes.push_back({to, barrier, map, x, y, z, rank, host_random() % 8});
}
static void host_line(u32 to, const void *from, u32 bytes, u32 barrier) {
    if (to % 16 || (size_t)from % 16 || bytes % 16) host_fault("a copy does not begin at 16 bytes");
    host_boxes.push_back({to, barrier, (const u64 *)from, int(bytes), 0, -1, host_rank(), host_random() % 8});
}
static void host_boxes_arrive() {
    for (size_t i = 0; i < host_boxes.size();) {
        Box &box = host_boxes[i];
        if (box.due) {
            box.due--, i++;
            continue;
        }
        if (box.z < 0) { // a line
            memcpy(host_shared + box.rank * HOST_ROOM + box.to, box.map, box.x);
            Barrier &b = host_barrier(box.barrier, box.rank);
            b.bytes -= box.x;
            host_check(b);
            host_boxes.erase(host_boxes.begin() + i);
            continue;
        }
        const unsigned short *from = (const unsigned short *)box.map[0];
        const int wide = box.map[1], high = box.map[2], deep = box.map[3], columns = box.map[4], lines = box.map[5];
        const long long pitch = box.map[6] ? box.map[6] : wide;
        for (int line = 0; line < lines; line++)
            for (int c = 0; c < columns; c++) {
                const int x = box.x + c, y = box.y + line;
                const unsigned short value =
                    x < wide && y < high && box.z < deep ? from[((long long)box.z * high + y) * pitch + x] : 0;
                memcpy(host_shared + box.rank * HOST_ROOM + host_swizzled(box.to + line * 128 + c * 2), &value, 2);
            }
        Barrier &b = host_barrier(box.barrier, box.rank);
        b.bytes -= columns * lines * 2;
        host_check(b);
        host_boxes.erase(host_boxes.begin() + i);
    }
}
static const bool host_copies_boxes = (host_tick = host_boxes_arrive, true);

// --- FP8: e4m3, or with e5m2 that

static unsigned host_fp8(float x, bool e5m2) {
    const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
    const unsigned sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return 0x7f;
    const double size = std::min(double(std::fabs(x)), e5m2 ? 57344.0 : 448.0);
    if (size == 0) return sign;
    const int e = std::max(std::ilogb(size), 1 - bias);
    return sign | (unsigned(e + bias - 1) << mantissa) + unsigned(std::nearbyint(std::ldexp(size, mantissa - e)));
}
static float host_from_fp8(unsigned bits, bool e5m2) {
    const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7, low = bits & (1 << mantissa) - 1;
    const int e = (bits & 0x7f) >> mantissa;
    if (e5m2 ? e == 31 : (bits & 0x7f) == 0x7f) return e5m2 && !low ? (bits & 0x80 ? -1 : 1) / 0.0f : 0.0f / 0.0f;
    const double size = std::ldexp(e ? low + (1 << mantissa) : low, (e ? e : 1) - bias - mantissa);
    return bits & 0x80 ? -size : size;
}

// --- wgmma

// Number n of the direction that stays, step k of the sum.
static float host_factor(u64 matrix, bool across, int n, int k) {
    const u32 base = (matrix & 0x3fff) << 4, chunk = (matrix >> 16 & 0x3fff) << 4;
    const u32 at = across ? base + n / 64 * chunk + k / 8 * 1024 + k % 8 * 128 + n % 64 * 2
                          : base + n / 8 * 1024 + n % 8 * 128 + k * 2;
    unsigned short bits;
    memcpy(&bits, host_at(host_swizzled(at)), 2);
    return __uint_as_float(unsigned(bits) << 16);
}
// The same of bytes; e5m2: e5m2.
static float host_fp8_factor(u64 matrix, bool e5m2, int n, int k) {
    const u32 at = ((matrix & 0x3fff) << 4) + n / 8 * 1024 + n % 8 * 128 + k;
    return host_from_fp8(*(const unsigned char *)host_at(host_swizzled(at)), e5m2);
}
struct Product {
    float (*d)[4];
    int tiles;
    u64 a, b;
    int add;
    bool a_across, b_across, held;
    float left[2][16];
    bool bytes, e5m2;
};
static std::vector<std::vector<Product>> host_products[1024];  // of a thread, by group; the last one is open
static void host_multiply(float (*d)[4], int tiles, u64 a, u64 b, int add, bool a_across, bool b_across) {
    auto &groups = host_products[current];
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back({d, tiles, a, b, add, a_across, b_across});
}
// The left factor in registers: four lanes hold a row of it. What they hold counts when the product begins.
static void host_multiply_held(float (*d)[4], int tiles, const u32 (&a)[4], u64 b) {
    host_multiply(d, tiles, 0, b, 1, false, true);
    Product &p = host_products[current].back().back();
    p.held = true;
    for (int i = 0; i < 4; i++)
        for (int c = 0; c < 4; c++) {
            const u32 pair = host_from(a[i], threadIdx.x % 32 / 4 * 4 + c);
            p.left[i % 2][i / 2 * 8 + 2 * c] = __uint_as_float(pair << 16);
            p.left[i % 2][i / 2 * 8 + 2 * c + 1] = __uint_as_float(pair & 0xffff0000u);
        }
}
static void host_multiply_fp8(float (*d)[4], int tiles, u64 a, u64 b, int add, bool e5m2) {
    host_multiply(d, tiles, a, b, add, false, false);
    Product &p = host_products[current].back().back();
    p.bytes = true, p.e5m2 = e5m2;
}
static void host_multiply_commit() { host_products[current].emplace_back(); }
static void host_multiply_wait(int pending) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    auto &groups = host_products[current];
    while (int(groups.size()) > pending + 1) {
        for (const Product &p : groups[0]) {
            if (p.bytes) {
                for (int n = 0; n < p.tiles; n++) for (int i = 0; i < 4; i++) {
                    float &sum = p.d[n][i], s = p.add ? sum : 0;
                    for (int k = 0; k < 32; k++)
                        s += host_fp8_factor(p.a, p.e5m2, row + 8 * (i / 2), k) *
                             host_fp8_factor(p.b, false, 8 * n + column + i % 2, k);
                    sum = s;
                }
                continue;
            }
            float left[2][16];
            memcpy(left, p.left, sizeof left);
            for (int half = 0; half < 2 && !p.held; half++)
                for (int k = 0; k < 16; k++) left[half][k] = host_factor(p.a, p.a_across, row + 8 * half, k);
            for (int n = 0; n < p.tiles; n++)
                for (int i = 0; i < 2; i++) {
                    float right[16];
                    for (int k = 0; k < 16; k++) right[k] = host_factor(p.b, p.b_across, 8 * n + column + i, k);
                    for (int half = 0; half < 2; half++) {
                        float &sum = p.d[n][2 * half + i], s = p.add ? sum : 0;
                        for (int k = 0; k < 16; k++) s += left[half][k] * right[k];
                        sum = s;
                    }
                }
        }
        groups.erase(groups.begin());
    }
}

// --- clusters

static Meeting host_cluster;
static void host_cluster_wait() { host_cluster.wait(contexts.size()); }
