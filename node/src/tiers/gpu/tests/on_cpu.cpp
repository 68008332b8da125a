// Runs the kernel of kernels.cu on the CPU, one thread after the other, and compares the result with memcpy. Argument: a
// seed. Built by tests/kernels.rs, with sanitizers if available: a misaligned access of a word is an error.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __global__
#define __device__
struct Index {
    unsigned x, y, z;
};
static Index blockIdx, blockDim, threadIdx, gridDim;
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

#include "../kernels.cu"

static u64 state;
static u64 chance(u64 of) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % of;
}

static void launch(const Hops &hops, unsigned rows, unsigned width, unsigned threads) {
    gridDim = {width, rows, 1};
    blockDim = {threads, 1, 1};
    // No thread waits for another, so they may run sequentially in any order: here the last first.
    for (unsigned row = rows; row-- > 0;)
        for (unsigned block = width; block-- > 0;)
            for (unsigned thread = threads; thread-- > 0;) {
                blockIdx = {block, row, 0};
                threadIdx = {thread, 0, 0};
                copy_slices(hops);
            }
}

int main(int, char **arguments) {
    state = strtoull(arguments[1], nullptr, 10) | 1;
    const u64 room = 1 << 16;
    unsigned char *from = static_cast<unsigned char *>(aligned_alloc(64, room));
    unsigned char *to = static_cast<unsigned char *>(aligned_alloc(64, room));
    u64 copied = 0, by_words = 0;
    for (int turn = 0; turn < 400; turn++) {
        for (u64 at = 0; at < room; at++) from[at] = (unsigned char)chance(256);
        memset(to, 0xee, room);
        std::vector<unsigned char> wanted(to, to + room);
        Hops hops = {};
        const unsigned rows = 1 + (unsigned)chance(32);
        u64 end = chance(40);
        for (unsigned row = 0; row < rows; row++) {
            // Short and long slices; some are aligned alike within 16 bytes, some within 4, some not at all.
            const u64 len = chance(3) == 0 ? chance(40) : chance(1500);
            u64 source = chance(room - 2000);
            const u64 like = chance(4);
            if (like < 2) source = source / 16 * 16 + end % 16;
            if (like == 2) source = source / 4 * 4 + end % 4;
            hops.hop[row] = {(u64)(from + source), (u64)(to + end), len};
            memcpy(&wanted[end], from + source, len);
            copied += len;
            by_words += like < 2 ? len : 0;
            // Sometimes two slices are adjacent.
            end += len + (chance(2) ? 0 : chance(30));
        }
        launch(hops, rows, 1 + (unsigned)chance(3), 1 + (unsigned)chance(70));
        if (memcmp(to, wanted.data(), room) != 0) {
            fprintf(stderr, "turn %d of seed %s is wrong\n", turn, arguments[1]);
            return 1;
        }
    }
    printf("%llu bytes, %llu of them where whole words fit\n", copied, by_words);
    free(from);
    free(to);
    return copied > 1000000 && by_words > 300000 ? 0 : 2;
}
