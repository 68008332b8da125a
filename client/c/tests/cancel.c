/* Cancels fetches at varying moments and writes to their slices as soon as they ended: these writes must persist.
 * chaos-tests/tests/c_engine.rs runs it against a cluster in which engine.c has saved its prompt.
 *
 *   cancel ROUTER CA_FILE CERT_FILE KEY_FILE SLICE_BYTES ROUNDS
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
#define AT_ONCE 8u
#define MINE 0xEE

static void check(kvf_status status, const char *what) {
    char text[512];
    if (status == KVF_OK) return;
    kvf_last_error(text, sizeof text);
    fprintf(stderr, "%s: %s: %s\n", what, kvf_status_name(status), text);
    exit(1);
}

/* The next end; the caller frees its result. */
static kvf_completion next_end(kvf_queue *queue) {
    for (;;) {
        kvf_completion entry;
        size_t count;
        check(kvf_queue_wait(queue, &entry, 1, sizeof entry, 30000000, &count), "wait");
        if (count == 0) {
            fprintf(stderr, "an operation never ended\n");
            exit(1);
        }
        if (entry.kind == KVF_ENDED) return entry;
    }
}

static void untouched(const uint8_t *slices, size_t bytes) {
    for (size_t byte = 0; byte < bytes; byte++)
        if (slices[byte] != MINE) {
            fprintf(stderr, "byte %zu was written after the end\n", byte);
            exit(1);
        }
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    const size_t bytes = (size_t)strtoul(argv[5], NULL, 10), all = SLICES * bytes;
    const unsigned long rounds = strtoul(argv[6], NULL, 10);
    const char *routers[] = {argv[1]};
    kvf_client_config config = {.size = sizeof config, .routers = routers, .routers_count = 1, .ca_file = argv[2],
                                .cert_file = argv[3], .key_file = argv[4]};
    kvf_client *client;
    kvf_queue *queue;
    check(kvf_client_open(&config, &client), "client");
    check(kvf_queue_open(client, NULL, &queue), "queue");

    /* The prompt of engine.c, and its source. */
    kvf_model model = {.size = sizeof model, .key_form = 1, .model = "emulated-8b", .weights_digest = "emulated",
                       .dtype = "bf16", .layout = "layer-major", .rope = "theta=500000", .adapter = "",
                       .layers = LAYERS, .tp = 1, .pp = 1, .rank = 0, .block_tokens = BLOCK_TOKENS};
    const uint8_t salt[32] = {0};
    uint32_t tokens[TOKENS], slice_bytes[LAYERS];
    kvf_hash hashes[BLOCKS];
    kvf_hasher *hasher;
    kvf_request_context asker = {.request = 2, .lease = 100, .turn = 1};
    size_t count;
    for (uint32_t at = 0; at < TOKENS; at++) tokens[at] = at * 2654435761u % 50000u;
    check(kvf_hasher_open(&model, salt, &hasher), "hasher");
    check(kvf_hasher_identity(hasher, &asker.identity), "identity");
    check(kvf_hasher_blocks(hasher, tokens, TOKENS, hashes, BLOCKS, &count), "hashes");
    kvf_hasher_free(hasher);
    kvf_route_call route = {.size = sizeof route, .asker = asker, .hashes = hashes, .hashes_count = BLOCKS,
                            .block_tokens = BLOCK_TOKENS, .input_tokens = TOKENS};
    kvf_operation ask = {sizeof ask, KVF_ROUTE, 0, &route};
    check(kvf_queue_submit(queue, &ask, 1), "route");
    kvf_completion routed = next_end(queue);
    kvf_source source;
    check(kvf_result_source(routed.result, 0, &source), "source");
    if (source.len_blocks != BLOCKS) return 1;

    uint8_t *memory = malloc(AT_ONCE * all);
    void *slices[AT_ONCE][SLICES];
    unsigned cancelled = 0, whole = 0;
    if (memory == NULL) return 1;
    memset(memory, MINE, AT_ONCE * all);
    for (size_t layer = 0; layer < LAYERS; layer++) slice_bytes[layer] = (uint32_t)bytes;
    for (size_t one = 0; one < AT_ONCE; one++)
        for (size_t slice = 0; slice < SLICES; slice++) slices[one][slice] = memory + one * all + slice * bytes;

    for (unsigned long round = 0; round < rounds; round++) {
        kvf_fetch_call calls[AT_ONCE];
        kvf_operation operations[AT_ONCE];
        for (size_t one = 0; one < AT_ONCE; one++) {
            untouched(memory + one * all, all);
            asker.lease++;
            calls[one] = (kvf_fetch_call){.size = sizeof calls[one], .asker = asker, .hashes = hashes,
                                          .hashes_count = BLOCKS, .sources = &source, .sources_count = 1,
                                          .slice_bytes = slice_bytes, .slices = slices[one],
                                          .slices_count = SLICES, .layers = LAYERS, .deadline_us = 20000000};
            operations[one] = (kvf_operation){sizeof operations[one], KVF_FETCH, one + 1, &calls[one]};
        }
        check(kvf_queue_submit(queue, operations, AT_ONCE), "submit");
        /* A different moment in each round, and for each fetch. */
        for (size_t one = 0; one < AT_ONCE; one++) {
            for (volatile unsigned long spin = 0; spin < round * 97 % 4001 * (one + 1); spin++) {
            }
            if (one % 4 != 3) kvf_queue_cancel(queue, one + 1); /* it may have ended */
        }
        kvf_completion ends[AT_ONCE];
        for (size_t one = 0; one < AT_ONCE; one++) {
            ends[one] = next_end(queue);
            if (ends[one].status == KVF_CANCELLED) cancelled++;
            if (ends[one].status == KVF_OK) whole++;
            memset(memory + (ends[one].tag - 1) * all, MINE, all); /* the memory is ours from now on */
        }
        for (size_t one = 0; one < AT_ONCE; one++) {
            kvf_lease lease;
            if (kvf_result_lease(ends[one].result, 0, &lease) == KVF_OK) {
                kvf_release_call call = {sizeof call, 0, &lease, 1};
                kvf_operation release = {sizeof release, KVF_RELEASE, 1, &call};
                check(kvf_queue_submit(queue, &release, 1), "release");
                kvf_result_free(next_end(queue).result);
            }
            kvf_result_free(ends[one].result);
        }
    }
    kvf_result_free(routed.result);
    kvf_queue_free(queue);
    kvf_client_free(client);
    for (size_t one = 0; one < AT_ONCE; one++) untouched(memory + one * all, all);
    free(memory);
    printf("%u cancelled, %u whole\n", cancelled, whole);
    return cancelled > 0 && whole > 0 ? 0 : 1;
}
