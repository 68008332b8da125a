/* Saves a prompt layer by layer, like an engine that reuses one layer's memory for the next, and reads it back: every byte must be
 * right. Abandoned saves store no block. chaos-tests/tests/c_engine.rs runs it against a cluster.
 *
 *   save_layers ROUTER CA_FILE CERT_FILE KEY_FILE SLICE_BYTES
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
#define ROUTES_MAX 10000u

static void check(kvf_status status, const char *what) {
    char text[512];
    if (status == KVF_OK) return;
    kvf_last_error(text, sizeof text);
    fprintf(stderr, "%s: %s: %s\n", what, kvf_status_name(status), text);
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
        check(kvf_queue_wait(queue, &entry, 1, sizeof entry, 30000000, &count), "wait");
        if (count == 0) exit(1);
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
    return (uint8_t)(block * 101 + layer * 31 + byte * 7 + 3);
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    const size_t bytes = (size_t)strtoul(argv[5], NULL, 10);
    const char *routers[] = {argv[1]};
    kvf_client_config config = {.size = sizeof config, .routers = routers, .routers_count = 1, .ca_file = argv[2],
                                .cert_file = argv[3], .key_file = argv[4]};
    kvf_client *client;
    kvf_queue *queue;
    check(kvf_client_open(&config, &client), "client");
    check(kvf_queue_open(client, NULL, &queue), "queue");

    /* A prompt that was not saved before. */
    kvf_model model = {.size = sizeof model, .key_form = 1, .model = "emulated-8b", .weights_digest = "emulated",
                       .dtype = "bf16", .layout = "layer-major", .rope = "theta=500000", .adapter = "",
                       .layers = LAYERS, .tp = 1, .pp = 1, .rank = 0, .block_tokens = BLOCK_TOKENS};
    const uint8_t salt[32] = {0};
    uint32_t tokens[TOKENS], slice_bytes[LAYERS];
    kvf_hash hashes[BLOCKS];
    kvf_hasher *hasher;
    kvf_request_context asker = {.request = 4, .lease = 2000000, .turn = 1};
    size_t count;
    for (uint32_t at = 0; at < TOKENS; at++) tokens[at] = at * 2246822519u % 40000u + 1;
    check(kvf_hasher_open(&model, salt, &hasher), "hasher");
    check(kvf_hasher_identity(hasher, &asker.identity), "identity");
    check(kvf_hasher_blocks(hasher, tokens, TOKENS, hashes, BLOCKS, &count), "hashes");
    kvf_hasher_free(hasher);
    for (size_t layer = 0; layer < LAYERS; layer++) slice_bytes[layer] = (uint32_t)bytes;
    kvf_route_call route = {.size = sizeof route, .fresh = 1, .asker = asker, .hashes = hashes, .hashes_count = BLOCKS,
                            .block_tokens = BLOCK_TOKENS, .input_tokens = TOKENS};
    kvf_decision decision = {.size = sizeof decision};
    kvf_result *routed = run(queue, KVF_ROUTE, &route);
    check(kvf_result_decision(routed, &decision), "decision");
    if (decision.fetch_blocks != 0 || decision.save_address == NULL) return 1;

    /* Layer by layer, from memory for one layer; the first save is abandoned after half of them. */
    uint8_t *memory = malloc(BLOCKS * bytes), *loaded = calloc(SLICES, bytes);
    const void *slices[BLOCKS];
    void *into[SLICES];
    if (memory == NULL || loaded == NULL) return 1;
    for (size_t block = 0; block < BLOCKS; block++) slices[block] = memory + block * bytes;
    for (size_t slice = 0; slice < SLICES; slice++) into[slice] = loaded + slice * bytes;
    kvf_save_layers_call call = {.size = sizeof call, .key_form = 1, .asker = asker,
                                 .address = decision.save_address, .epoch = decision.save_epoch, .hashes = hashes,
                                 .hashes_count = BLOCKS, .slice_bytes = slice_bytes, .layers = LAYERS};
    for (int is_whole = 0; is_whole < 2; is_whole++) {
        kvf_layer_save *save;
        check(kvf_save_layers_begin(client, &call, &save), "begin");
        for (size_t layer = 0; layer < (is_whole ? LAYERS : LAYERS / 2); layer++) {
            for (size_t block = 0; block < BLOCKS; block++)
                for (size_t byte = 0; byte < bytes; byte++)
                    memory[block * bytes + byte] = pattern(block, layer, byte);
            check(kvf_save_layers_put(save, slices, BLOCKS), "put");
            memset(memory, 0xEE, BLOCKS * bytes); /* the memory is the engine's again */
        }
        if (is_whole) check(kvf_save_layers_finish(save), "finish");
        if (!is_whole && kvf_save_layers_finish(save) != KVF_INVALID) return 1;
        kvf_save_layers_drop(save);
        if (is_whole) break;
        kvf_result *again = run(queue, KVF_ROUTE, &route);
        check(kvf_result_decision(again, &decision), "decision");
        if (decision.fetch_blocks != 0) return 1;
        kvf_result_free(again);
    }
    free(memory);
    kvf_result_free(routed);

    /* It is sent in the background: routes find it eventually. */
    unsigned routes = 0;
    for (;;) {
        routed = run(queue, KVF_ROUTE, &route);
        check(kvf_result_decision(routed, &decision), "decision");
        if (decision.fetch_blocks == BLOCKS) break;
        kvf_result_free(routed);
        if (++routes == ROUTES_MAX) {
            fprintf(stderr, "it never got there\n");
            return 1;
        }
    }
    kvf_source source;
    check(kvf_result_source(routed, 0, &source), "source");
    asker.lease++;
    kvf_fetch_call fetch = {.size = sizeof fetch, .asker = asker, .hashes = hashes, .hashes_count = BLOCKS,
                            .sources = &source, .sources_count = 1, .slice_bytes = slice_bytes, .slices = into,
                            .slices_count = SLICES, .layers = LAYERS, .deadline_us = 20000000};
    kvf_result *ended = run(queue, KVF_FETCH, &fetch);
    for (size_t block = 0; block < BLOCKS; block++)
        for (size_t layer = 0; layer < LAYERS; layer++)
            for (size_t byte = 0; byte < bytes; byte++)
                if (loaded[(block * LAYERS + layer) * bytes + byte] != pattern(block, layer, byte)) {
                    fprintf(stderr, "byte %zu of layer %zu of block %zu is wrong\n", byte, layer, block);
                    return 1;
                }
    kvf_lease lease;
    check(kvf_result_lease(ended, 0, &lease), "lease");
    kvf_release_call release = {sizeof release, 0, &lease, 1};
    kvf_result_free(run(queue, KVF_RELEASE, &release));
    kvf_result_free(ended);
    kvf_result_free(routed);
    kvf_queue_free(queue);
    kvf_client_free(client);
    free(loaded);
    printf("saved by layers, all bytes right\n");
    return 0;
}
