/* Prefills that overlap with their load: of a prompt that a node holds, of one that no node holds, and of one with its second half on a
 * node that accepts connections and never answers. Recomputed blocks are "computed" into separate memory. Each byte of each layer must be
 * right when reported as present, and returned slices stay unchanged. chaos-tests/tests/c_engine.rs runs it against a cluster.
 *
 *   prefill ROUTER CA_FILE CERT_FILE KEY_FILE SLICE_BYTES SILENT
 *
 * SILENT is host:port of that node.
 */
#include <kvfleet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAYERS 32u
#define BLOCK_TOKENS 512u
#define BLOCKS 4u
#define TOKENS (BLOCK_TOKENS * BLOCKS)
#define SLICES (BLOCKS * LAYERS)
#define MINUTE 60000000u /* us */
#define SECOND_NS 1000000000u
#define MINE 0xEE

static void check(kvf_status status, const char *what) {
    char text[512];
    if (status == KVF_OK) return;
    kvf_last_error(text, sizeof text);
    fprintf(stderr, "%s: %s: %s\n", what, kvf_status_name(status), text);
    exit(1);
}

static void must(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "not so: %s\n", what);
    exit(1);
}

/* Submits one operation and waits for its successful end. The caller frees the result. */
static kvf_result *run(kvf_queue *queue, uint32_t kind, const void *call) {
    static uint64_t tag = 0;
    kvf_operation operation = {sizeof operation, kind, ++tag, call};
    check(kvf_queue_submit(queue, &operation, 1), "submit");
    for (;;) {
        kvf_completion entry;
        size_t count;
        check(kvf_queue_wait(queue, &entry, 1, sizeof entry, MINUTE, &count), "wait");
        must(count == 1, "an operation ends");
        if (entry.kind != KVF_ENDED) continue;
        if (entry.status != KVF_OK) {
            char text[512];
            kvf_result_message(entry.result, text, sizeof text);
            fprintf(stderr, "operation %u: %s: %s\n", (unsigned)kind, kvf_status_name(entry.status), text);
            exit(1);
        }
        return entry.result;
    }
}

static uint8_t pattern(size_t block, size_t layer, size_t byte) {
    return (uint8_t)(block * 59 + layer * 37 + byte * 11 + 5);
}

/* Checks that a block's layers before `layers` are as saved. */
static void right(const uint8_t *memory, size_t bytes, size_t block, size_t layers) {
    for (size_t layer = 0; layer < layers; layer++)
        for (size_t byte = 0; byte < bytes; byte++)
            must(memory[(block * LAYERS + layer) * bytes + byte] == pattern(block, layer, byte), "bytes are right");
}

/* Whether a block is in the list. */
static int among(const uint32_t *blocks, uint32_t count, uint32_t block) {
    for (uint32_t at = 0; at < count; at++)
        if (blocks[at] == block) return 1;
    return 0;
}

/* Runs a prefill to its last layer, and checks every slice reported as present. Returns how many layers of blocks were computed. */
static unsigned follow(kvf_prefill *prefill, const uint8_t *memory, size_t bytes) {
    uint32_t computed[BLOCKS] = {0}, blocks[BLOCKS], layer = 0;
    unsigned cells = 0;
    for (;;) {
        kvf_step step = {.size = sizeof step};
        check(kvf_prefill_next(prefill, MINUTE, &step, blocks, BLOCKS), "next");
        if (step.kind == KVF_STEP_DONE) break;
        if (step.kind == KVF_STEP_WAIT) continue;
        for (uint32_t at = 0; at < step.blocks; at++) {
            const uint32_t block = blocks[at], first = computed[block];
            must(block < BLOCKS && (at == 0 || blocks[at - 1] < block), "blocks are in ascending order");
            must(first == (step.kind == KVF_STEP_LAYER ? step.layer : 0), "each layer of a block is computed once, in order");
            computed[block] = step.kind == KVF_STEP_LAYER ? step.layer + 1 : step.layer;
            cells += computed[block] - first;
        }
        if (step.kind != KVF_STEP_LAYER) continue;
        must(step.layer == layer++, "layers are in order");
        for (uint32_t block = 0; block < BLOCKS; block++)
            if (!among(blocks, step.blocks, block)) right(memory, bytes, block, layer);
    }
    must(layer == LAYERS, "all layers were said");
    return cells;
}

/* Ends it and takes its memory back. Returns how many blocks were computed. */
static unsigned finish(kvf_queue *queue, kvf_prefill *prefill, uint8_t *memory, size_t bytes) {
    kvf_result *result;
    kvf_prefilled prefilled = {.size = sizeof prefilled};
    kvf_lease leases[2];
    kvf_returned_block back[3];
    uint32_t came[BLOCKS] = {0}, seen = 0, whole = 0, computed = 0;
    size_t count, held = 0;
    check(kvf_prefill_end(prefill, &result), "end");
    check(kvf_result_prefilled(result, &prefilled), "prefilled");
    must(prefilled.computed_count == BLOCKS && prefilled.wrong_blocks == 0, "it is of all blocks");
    for (;;) {
        kvf_status status = kvf_prefill_returned(prefill, back, 3, sizeof back[0], MINUTE, &count);
        if (status == KVF_CLOSED) break;
        check(status, "back");
        must(count > 0, "slices come back");
        for (size_t at = 0; at < count; at++) {
            must(back[at].block < BLOCKS && came[back[at].block]++ == 0, "each block comes back once");
            right(memory, bytes, back[at].block, back[at].layers);
            memset(memory + back[at].block * LAYERS * bytes, MINE, LAYERS * bytes); /* the memory is ours again */
            whole += back[at].layers == LAYERS;
            seen++;
        }
    }
    must(seen == BLOCKS, "all blocks come back");
    for (size_t block = 0; block < BLOCKS; block++) computed += prefilled.computed[block];
    must(computed + whole >= BLOCKS, "each block was computed or is there");
    while (held < 2 && kvf_result_lease(result, held, &leases[held]) == KVF_OK) held++;
    /* Not the lease on the silent node, which expires. */
    kvf_release_call release = {sizeof release, 0, leases, held > 0};
    kvf_result_free(run(queue, KVF_RELEASE, &release));
    kvf_result_free(result);
    kvf_prefill_free(prefill);
    for (size_t byte = 0; byte < SLICES * bytes; byte++) must(memory[byte] == MINE, "nothing is written behind the end");
    return computed;
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    const size_t bytes = (size_t)strtoul(argv[5], NULL, 10);
    const char *routers[] = {argv[1]};
    kvf_client_config config = {.size = sizeof config, .routers = routers, .routers_count = 1, .ca_file = argv[2],
                                .cert_file = argv[3], .key_file = argv[4], .transport = "tcp"};
    kvf_client *client;
    kvf_queue *queue;
    check(kvf_client_open(&config, &client), "client");
    check(kvf_queue_open(client, NULL, &queue), "queue");

    /* A prompt that is saved first, and one that no node holds. */
    kvf_model model = {.size = sizeof model, .key_form = 1, .model = "emulated-8b", .weights_digest = "emulated",
                       .dtype = "bf16", .layout = "layer-major", .rope = "theta=500000", .adapter = "",
                       .layers = LAYERS, .tp = 1, .pp = 1, .rank = 0, .block_tokens = BLOCK_TOKENS};
    const uint8_t salt[32] = {0};
    uint32_t tokens[TOKENS], slice_bytes[LAYERS];
    kvf_hash hashes[BLOCKS], nobodys[BLOCKS];
    kvf_hasher *hasher;
    kvf_request_context asker = {.request = 5, .lease = 3000000, .turn = 1};
    size_t count;
    check(kvf_hasher_open(&model, salt, &hasher), "hasher");
    check(kvf_hasher_identity(hasher, &asker.identity), "identity");
    for (uint32_t at = 0; at < TOKENS; at++) tokens[at] = at * 3266489917u % 30000u + 7;
    check(kvf_hasher_blocks(hasher, tokens, TOKENS, hashes, BLOCKS, &count), "hashes");
    tokens[0]++;
    check(kvf_hasher_blocks(hasher, tokens, TOKENS, nobodys, BLOCKS, &count), "hashes");
    kvf_hasher_free(hasher);
    for (size_t layer = 0; layer < LAYERS; layer++) slice_bytes[layer] = (uint32_t)bytes;
    kvf_route_call route = {.size = sizeof route, .fresh = 1, .asker = asker, .hashes = hashes, .hashes_count = BLOCKS,
                            .block_tokens = BLOCK_TOKENS, .input_tokens = TOKENS};
    kvf_decision decision = {.size = sizeof decision};
    kvf_result *routed = run(queue, KVF_ROUTE, &route);
    check(kvf_result_decision(routed, &decision), "decision");
    must(decision.fetch_blocks == 0 && decision.save_address != NULL, "nobody has it");
    uint8_t *memory = malloc(SLICES * bytes);
    void *slices[SLICES];
    const void *saved[SLICES];
    must(memory != NULL, "there is memory");
    for (size_t slice = 0; slice < SLICES; slice++) {
        saved[slice] = slices[slice] = memory + slice * bytes;
        for (size_t byte = 0; byte < bytes; byte++)
            memory[slice * bytes + byte] = pattern(slice / LAYERS, slice % LAYERS, byte);
    }
    kvf_save_call save = {.size = sizeof save, .key_form = 1, .asker = asker, .address = decision.save_address,
                          .epoch = decision.save_epoch, .hashes = hashes, .hashes_count = BLOCKS,
                          .slice_bytes = slice_bytes, .slices = saved, .slices_count = SLICES, .layers = LAYERS,
                          .deadline_us = MINUTE};
    kvf_result_free(run(queue, KVF_SAVE, &save));
    kvf_lease lease = {decision.save_address, asker.lease};
    kvf_release_call release = {sizeof release, 0, &lease, 1};
    kvf_result_free(run(queue, KVF_RELEASE, &release));

    /* A layer of a block takes forty seconds, and a wasted wait more than a minute: even on the slowest machine present data arrives first. */
    uint64_t block_layer_ns[BLOCKS];
    for (size_t block = 0; block < BLOCKS; block++) block_layer_ns[block] = 40ull * SECOND_NS;
    kvf_source sources[2] = {{.address = decision.save_address, .epoch = decision.save_epoch, .node = decision.save_node,
                              .tier = decision.save_tier, .len_blocks = BLOCKS},
                             {.address = argv[6], .epoch = 1, .node = 99, .tier = 1, .start_blocks = BLOCKS / 2,
                              .len_blocks = BLOCKS / 2}};
    kvf_prefill_call call = {.size = sizeof call, .layers = LAYERS, .asker = asker, .hashes = hashes,
                             .hashes_count = BLOCKS, .sources = sources, .sources_count = 1,
                             .slice_bytes = slice_bytes, .slices = slices, .slices_count = SLICES,
                             .costs = {block_layer_ns, BLOCKS, 40ull * SECOND_NS},
                             .read_buffer_bytes_max = SLICES * bytes};
    kvf_prefill *prefill;
    call.asker.lease++;
    memset(memory, 0, SLICES * bytes);
    check(kvf_prefill_begin(client, &call, &prefill), "begin");
    must(kvf_prefill_read_buffer_bytes(prefill) <= SLICES * bytes, "it loads no more than it may before its turn");
    unsigned cells = follow(prefill, memory, bytes);
    unsigned computed = finish(queue, prefill, memory, bytes);
    printf("held: computed %u of %u blocks in %u cells\n", computed, BLOCKS, cells);

    call.asker.lease++;
    call.hashes = nobodys;
    check(kvf_prefill_begin(client, &call, &prefill), "begin");
    cells = follow(prefill, memory, bytes);
    computed = finish(queue, prefill, memory, bytes);
    printf("held by nobody: computed %u of %u blocks in %u cells\n", computed, BLOCKS, cells);

    /* Now a wasted wait takes half a second, and recomputing two thirds of a minute. On a slow machine the held half may be later
     * than that, too, and is computed. */
    call.asker.lease++;
    call.hashes = hashes;
    sources[0].len_blocks = BLOCKS / 2;
    call.sources_count = 2;
    for (size_t block = 0; block < BLOCKS; block++) block_layer_ns[block] = SECOND_NS / 4;
    call.costs.new_layer_ns = SECOND_NS / 4;
    check(kvf_prefill_begin(client, &call, &prefill), "begin");
    cells = follow(prefill, memory, bytes);
    computed = finish(queue, prefill, memory, bytes);
    must(computed >= BLOCKS / 2 && cells >= BLOCKS / 2 * LAYERS, "what is silent is computed");
    printf("half of it silent: that half is computed\n");

    kvf_result_free(routed);
    kvf_queue_free(queue);
    kvf_client_free(client);
    free(memory);
    return 0;
}
