// Copies slices within device memory, many in one launch: a gather from scattered sources, or a scatter to scattered
// destinations. Compiled when a node opens a GPU (kernels.rs), and for the CPU by a test (tests/on_cpu.cpp).
// Not here: choosing the slices, and checking that their memory may be accessed.

typedef unsigned long long u64;

struct Hop {
    u64 from;
    u64 to;
    u64 len;
};

// As many as fit into a launch's parameters without a separate copy; SLICES_PER_LAUNCH in kernels.rs is the same.
struct Hops {
    Hop hop[32];
};

// Copies words of one size, and the bytes before and after them. `from` and `to` have the same offset within a word.
template <typename Word>
static __device__ void copy_by(const Hop &hop, u64 first, u64 step) {
    const u64 size = sizeof(Word);
    u64 head = (size - hop.from % size) % size;
    if (head > hop.len) head = hop.len;
    const u64 words = (hop.len - head) / size;
    const u64 tail = head + words * size;
    const Word *from_words = reinterpret_cast<const Word *>(hop.from + head);
    Word *to_words = reinterpret_cast<Word *>(hop.to + head);
    for (u64 at = first; at < words; at += step) to_words[at] = from_words[at];
    const unsigned char *from = reinterpret_cast<const unsigned char *>(hop.from);
    unsigned char *to = reinterpret_cast<unsigned char *>(hop.to);
    const u64 rest = head + (hop.len - tail);
    for (u64 number = first; number < rest; number += step) {
        const u64 at = number < head ? number : tail + (number - head);
        to[at] = from[at];
    }
}

// One row of blocks for each slice; the threads of a row share its words.
extern "C" __global__ void copy_slices(const Hops hops) {
    const Hop hop = hops.hop[blockIdx.y];
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 step = (u64)gridDim.x * blockDim.x;
    const u64 apart = hop.from ^ hop.to;
    if (apart % 16 == 0) {
        copy_by<uint4>(hop, first, step);
    } else if (apart % 4 == 0) {
        copy_by<unsigned>(hop, first, step);
    } else {
        copy_by<unsigned char>(hop, first, step);
    }
}
