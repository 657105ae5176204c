// What our own matrix products share: which part of a product a block works on.
//
// A product is cut into tiles. Where there are too few tiles for all multiprocessors, the sum over k is cut as well,
// into `splits` parts of nearly the same number of steps (split-K). A part of a tile is a unit of work. Blocks that run
// at the same time take consecutive units, and should read the same lines of the factors while these are in the L2
// cache. Hence the order: all tiles of the first part, then all of the next; tiles in bands of `band` rows of tiles,
// down a column of the band, then the next column.

#include "ops/common.cuh"

struct Unit {
    int down, across, split;  // row and column of the tile, in tiles; part of the sum
    int first, stop;          // steps of the sum
};

struct Tiling {
    int down, across, band, splits, steps;

    __device__ __forceinline__ int units() const { return down * across * splits; }
    __device__ __forceinline__ Unit unit(int number) const {
        const int tiles = down * across, split = number / tiles, tile = number % tiles;
        const int top = tile / (band * across) * band, height = min(band, down - top), inside = tile - top * across;
        return {top + inside % height, inside / height, split, split * steps / splits, (split + 1) * steps / splits};
    }
};
