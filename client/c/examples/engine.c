/* A minimal engine: routes a prompt, "computes" it, saves it, routes it again, and fetches it into its own memory.
 * Instead of attention, it fills each slice with a pattern and checks it afterwards.
 *
 *   cc -I client/c/include client/c/examples/engine.c -L DIR -lkvfleet_client_c -o engine
 *   ./engine ROUTER CA_FILE CERT_FILE KEY_FILE SLICE_BYTES
 *
 * ROUTER is host:port, the files are those of the cluster (`kvfleet up` prints their paths), SLICE_BYTES is a node's
 * block_bytes divided by the layers of its model. Not here: concurrent prompts, and overlap with compute.
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
#define SECOND 1000000u /* us */

static void check(kvf_status status, const char *what) {
    char text[512];
    if (status == KVF_OK) return;
    kvf_last_error(text, sizeof text);
    fprintf(stderr, "%s: %s: %s\n", what, kvf_status_name(status), text);
    exit(1);
}

/* Submits one operation, prints its layers, and waits for its end. The caller frees the result. */
static kvf_result *run(kvf_queue *queue, uint32_t kind, const void *call, kvf_status expected) {
    static uint64_t tag = 0;
    kvf_operation operation = {sizeof operation, kind, ++tag, call};
    kvf_completion entry;
    size_t count;
    check(kvf_queue_submit(queue, &operation, 1), "submit");
    for (;;) {
        check(kvf_queue_wait(queue, &entry, 1, sizeof entry, 30 * SECOND, &count), "wait");
        if (count == 0) {
            fprintf(stderr, "nothing came of operation %u\n", (unsigned)kind);
            exit(1);
        }
        if (entry.kind == KVF_RECOMPUTE) printf("compute from block %u on\n", (unsigned)entry.block);
        if (entry.kind == KVF_LAYER && (entry.layer == 0 || entry.layer == LAYERS - 1))
            printf("layer %u of %u blocks is there\n", (unsigned)entry.layer, (unsigned)entry.block);
        if (entry.kind != KVF_ENDED) continue;
        if (entry.status != expected) {
            char text[512];
            kvf_result_message(entry.result, text, sizeof text);
            fprintf(stderr, "operation %u: %s: %s\n", (unsigned)kind, kvf_status_name(entry.status), text);
            exit(1);
        }
        return entry.result;
    }
}

/* Releases the leases of an operation. */
static void release(kvf_queue *queue, const kvf_result *result) {
    size_t at = 0;
    for (;;) {
        kvf_lease leases[8];
        size_t count = 0;
        while (count < 8 && kvf_result_lease(result, at, &leases[count]) == KVF_OK) at++, count++;
        if (count == 0) return;
        kvf_release_call call = {sizeof call, 0, leases, count};
        kvf_result_free(run(queue, KVF_RELEASE, &call, KVF_OK));
    }
}

static uint8_t pattern(size_t slice, size_t byte) { return (uint8_t)(slice * 31 + byte * 7 + 1); }

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: engine ROUTER CA_FILE CERT_FILE KEY_FILE SLICE_BYTES\n");
        return 2;
    }
    const size_t bytes = (size_t)strtoul(argv[5], NULL, 10);
    if (kvf_abi_version() != KVF_ABI_VERSION) {
        fprintf(stderr, "this library is not the one of this header\n");
        return 1;
    }

    /* The cluster. */
    const char *routers[] = {argv[1]};
    kvf_client_config config = {.size = sizeof config, .routers = routers, .routers_count = 1, .ca_file = argv[2],
                                .cert_file = argv[3], .key_file = argv[4]};
    kvf_client *client;
    kvf_queue *queue;
    check(kvf_client_open(&config, &client), "client");
    check(kvf_queue_open(client, NULL, &queue), "queue");

    /* The prompt. */
    kvf_model model = {.size = sizeof model, .key_form = 1, .model = "emulated-8b", .weights_digest = "emulated",
                       .dtype = "bf16", .layout = "layer-major", .rope = "theta=500000", .adapter = "",
                       .layers = LAYERS, .tp = 1, .pp = 1, .rank = 0, .block_tokens = BLOCK_TOKENS};
    const uint8_t salt[32] = {0};
    uint32_t tokens[TOKENS];
    kvf_hash hashes[BLOCKS];
    kvf_hasher *hasher;
    size_t count;
    kvf_request_context asker = {.request = 1, .lease = 1, .turn = 1};
    for (uint32_t at = 0; at < TOKENS; at++) tokens[at] = at * 2654435761u % 50000u;
    check(kvf_hasher_open(&model, salt, &hasher), "hasher");
    check(kvf_hasher_identity(hasher, &asker.identity), "identity");
    check(kvf_hasher_blocks(hasher, tokens, TOKENS, hashes, BLOCKS, &count), "hashes");
    kvf_hasher_free(hasher);

    /* Route: no node holds any of it yet. */
    kvf_route_call route = {.size = sizeof route, .fresh = 1, .asker = asker, .hashes = hashes, .hashes_count = count,
                            .block_tokens = BLOCK_TOKENS, .input_tokens = TOKENS};
    kvf_decision decision = {.size = sizeof decision};
    kvf_result *routed = run(queue, KVF_ROUTE, &route, KVF_OK);
    check(kvf_result_decision(routed, &decision), "decision");
    printf("instance %u fetches %u blocks and computes %u\n", (unsigned)decision.instance,
           (unsigned)decision.fetch_blocks, (unsigned)decision.recompute_blocks);
    if (decision.save_address == NULL) {
        fprintf(stderr, "no node takes blocks\n");
        return 1;
    }

    /* Compute and save: the slices belong to the engine and stay unchanged until the end. */
    uint32_t slice_bytes[LAYERS];
    uint8_t *computed = malloc(SLICES * bytes), *loaded = calloc(SLICES, bytes);
    const void *from[SLICES];
    void *into[SLICES];
    if (computed == NULL || loaded == NULL) return 1;
    for (size_t layer = 0; layer < LAYERS; layer++) slice_bytes[layer] = (uint32_t)bytes;
    for (size_t slice = 0; slice < SLICES; slice++) {
        for (size_t byte = 0; byte < bytes; byte++) computed[slice * bytes + byte] = pattern(slice, byte);
        from[slice] = computed + slice * bytes;
        into[slice] = loaded + slice * bytes;
    }
    kvf_save_call save = {.size = sizeof save, .key_form = 1, .asker = asker, .address = decision.save_address,
                          .epoch = decision.save_epoch, .hashes = hashes, .hashes_count = count,
                          .slice_bytes = slice_bytes, .slices = from, .slices_count = SLICES, .layers = LAYERS};
    kvf_saved saved = {.size = sizeof saved};
    kvf_result *ended = run(queue, KVF_SAVE, &save, KVF_OK);
    check(kvf_result_saved(ended, &saved), "saved");
    printf("saved %u blocks\n", (unsigned)saved.stored_blocks);
    memset(computed, 0, SLICES * bytes); /* the memory is the engine's again */
    release(queue, ended);
    kvf_result_free(ended);
    kvf_result_free(routed);

    /* The same prompt again, with an answer that takes the save into account. */
    route.after = &saved.visible_at;
    route.after_count = 1;
    routed = run(queue, KVF_ROUTE, &route, KVF_OK);
    check(kvf_result_decision(routed, &decision), "decision");
    printf("instance %u fetches %u blocks and computes %u\n", (unsigned)decision.instance,
           (unsigned)decision.fetch_blocks, (unsigned)decision.recompute_blocks);
    kvf_source sources[8];
    size_t sources_count = 0, blocks = 0;
    while (sources_count < 8 && kvf_result_source(routed, sources_count, &sources[sources_count]) == KVF_OK)
        blocks += sources[sources_count++].len_blocks;

    /* Fetch each slice to its destination. */
    asker.lease = 2;
    kvf_fetch_call fetch = {.size = sizeof fetch, .asker = asker, .hashes = hashes, .hashes_count = count,
                            .sources = sources, .sources_count = sources_count, .slice_bytes = slice_bytes,
                            .slices = into, .slices_count = blocks * LAYERS, .layers = LAYERS,
                            .resident_blocks = decision.resident_blocks, .deadline_us = 20 * SECOND};
    kvf_fetched fetched = {.size = sizeof fetched};
    ended = run(queue, KVF_FETCH, &fetch, KVF_OK);
    check(kvf_result_fetched(ended, &fetched), "fetched");
    for (size_t slice = 0; slice < blocks * LAYERS; slice++)
        for (size_t byte = 0; byte < bytes; byte++)
            if (loaded[slice * bytes + byte] != pattern(slice, byte)) {
                fprintf(stderr, "byte %zu of slice %zu is wrong\n", byte, slice);
                return 1;
            }
    printf("fetched %u blocks, all bytes right\n", (unsigned)fetched.end_block);
    release(queue, ended);
    kvf_result_free(ended);
    kvf_result_free(routed);

    /* Only now may the slices be freed. */
    check(kvf_queue_close(queue, 10 * SECOND), "close");
    kvf_queue_free(queue);
    kvf_client_free(client);
    free(computed);
    free(loaded);
    return 0;
}
