/* An engine that reports to routers by itself: its load, its links and the outcome of a request. It also prints the paths of its
 * blocks, and asks whether a request may decode. chaos-tests/tests/c_engine.rs runs it against a cluster in which engine.c has
 * saved its prompt, and checks the router's state; it ends with its standard input.
 *
 *   reports ROUTER CA_FILE CERT_FILE KEY_FILE SLICE_BYTES
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
#define FETCHES 40u

static void check(kvf_status status, const char *what) {
    char text[512];
    if (status == KVF_OK) return;
    kvf_last_error(text, sizeof text);
    fprintf(stderr, "%s: %s: %s\n", what, kvf_status_name(status), text);
    exit(1);
}

/* Submits one operation and returns its end; the caller frees the result. */
static kvf_completion ended(kvf_queue *queue, uint32_t kind, const void *call) {
    kvf_operation operation = {sizeof operation, kind, 1, call};
    check(kvf_queue_submit(queue, &operation, 1), "submit");
    for (;;) {
        kvf_completion entry;
        size_t count;
        check(kvf_queue_wait(queue, &entry, 1, sizeof entry, 30000000, &count), "wait");
        if (count == 0) exit(1);
        if (entry.kind == KVF_ENDED) return entry;
    }
}

/* The same for an operation that must succeed. */
static kvf_result *run(kvf_queue *queue, uint32_t kind, const void *call) {
    kvf_completion entry = ended(queue, kind, call);
    if (entry.status != KVF_OK) {
        char text[512];
        kvf_result_message(entry.result, text, sizeof text);
        fprintf(stderr, "operation %u: %s: %s\n", (unsigned)kind, kvf_status_name(entry.status), text);
        exit(1);
    }
    return entry.result;
}

/* The same for a route, repeated until routers know this instance, the only one. */
static kvf_result *routed_here(kvf_queue *queue, const kvf_route_call *route) {
    for (;;) {
        kvf_completion entry = ended(queue, KVF_ROUTE, route);
        if (entry.status == KVF_OK) return entry.result;
        if (entry.status != KVF_REJECTED || kvf_result_retry_after_us(entry.result) == 0) exit(1);
        kvf_result_free(entry.result);
    }
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    const size_t bytes = (size_t)strtoul(argv[5], NULL, 10);
    const char *routers[] = {argv[1]};
    kvf_client_config config = {.size = sizeof config, .routers = routers, .routers_count = 1, .ca_file = argv[2],
                                .cert_file = argv[3], .key_file = argv[4], .transport = "tcp"};
    kvf_client *client;
    kvf_queue *queue;
    kvf_reporter *reporter;
    check(kvf_client_open(&config, &client), "client");
    check(kvf_queue_open(client, NULL, &queue), "queue");

    /* The instance. It has no local node. */
    kvf_reporter_config says = {.size = sizeof says, .instance = 2, .address = "127.0.0.1:9", .host = "elsewhere",
                                .every_ms = 20};
    kvf_load load = {.size = sizeof load, .running = 1, .waiting = 2, .queue_tokens = 77};
    check(kvf_reporter_open(client, &says, &reporter), "reporter");
    check(kvf_reporter_load(reporter, &load), "load");

    /* The prompt of engine.c, and its source. */
    kvf_model model = {.size = sizeof model, .key_form = 1, .model = "emulated-8b", .weights_digest = "emulated",
                       .dtype = "bf16", .layout = "layer-major", .rope = "theta=500000", .adapter = "",
                       .layers = LAYERS, .tp = 1, .pp = 1, .rank = 0, .block_tokens = BLOCK_TOKENS};
    const uint8_t salt[32] = {0};
    uint32_t tokens[TOKENS], slice_bytes[LAYERS];
    kvf_hash hashes[BLOCKS];
    kvf_hasher *hasher;
    kvf_request_context asker = {.request = 3, .lease = 1000000, .turn = 1};
    size_t count;
    for (uint32_t at = 0; at < TOKENS; at++) tokens[at] = at * 2654435761u % 50000u;
    check(kvf_hasher_open(&model, salt, &hasher), "hasher");
    check(kvf_hasher_identity(hasher, &asker.identity), "identity");
    check(kvf_hasher_blocks(hasher, tokens, TOKENS, hashes, BLOCKS, &count), "hashes");
    kvf_hasher_free(hasher);
    kvf_route_call route = {.size = sizeof route, .asker = asker, .hashes = hashes, .hashes_count = BLOCKS,
                            .block_tokens = BLOCK_TOKENS, .input_tokens = TOKENS};
    kvf_result *routed = routed_here(queue, &route);
    kvf_source source;
    check(kvf_result_source(routed, 0, &source), "source");
    if (source.len_blocks != BLOCKS) return 1;

    uint8_t *memory = calloc(SLICES, bytes);
    void *slices[SLICES];
    if (memory == NULL) return 1;
    for (size_t layer = 0; layer < LAYERS; layer++) slice_bytes[layer] = (uint32_t)bytes;
    for (size_t slice = 0; slice < SLICES; slice++) slices[slice] = memory + slice * bytes;
    kvf_fetch_call fetch = {.size = sizeof fetch, .asker = asker, .hashes = hashes, .hashes_count = BLOCKS,
                            .sources = &source, .sources_count = 1, .slice_bytes = slice_bytes, .slices = slices,
                            .slices_count = SLICES, .layers = LAYERS, .deadline_us = 20000000};
    for (unsigned at = 1; at < FETCHES; at++) kvf_result_free(run(queue, KVF_FETCH, &fetch));
    kvf_result *fetched = run(queue, KVF_FETCH, &fetch);

    /* Its prompt is computed. With a limit of one microsecond between tokens it cannot decode beside the running request. */
    kvf_admit_decode_call may = {sizeof may, 2, asker.request, 1};
    kvf_completion ends = ended(queue, KVF_ADMIT_DECODE, &may);
    may.tbt_max_us = 0;
    kvf_completion begins = ended(queue, KVF_ADMIT_DECODE, &may);
    printf("to decode: %s and %s, %s\n", kvf_status_name(ends.status), kvf_status_name(begins.status),
           kvf_result_retry_after_us(ends.result) > 0 ? "with its time" : "without a time");
    kvf_result_free(ends.result);
    kvf_result_free(begins.result);
    kvf_outcome outcome = {.size = sizeof outcome, .request = asker.request, .ttft_us = 5000, .fetched = fetched};
    check(kvf_reporter_outcome(reporter, &outcome), "first token");
    kvf_outcome end = {.size = sizeof end, .request = asker.request, .output_tokens = 9, .tbt_us = 7000};
    check(kvf_reporter_outcome(reporter, &end), "end");
    kvf_result_free(fetched);

    /* Prefetches are slower than awaited fetches and do not count for a link. */
    kvf_link link;
    check(kvf_client_links(client, &link, 1, sizeof link, &count), "links");
    printf("%u link: %u fetches from node %u over %u out of %u\n", (unsigned)count, (unsigned)link.fetches,
           (unsigned)link.node, (unsigned)link.path, (unsigned)link.tier);
    fetch.asker.qos = KVF_QOS_PREFETCH;
    kvf_result_free(run(queue, KVF_FETCH, &fetch));
    check(kvf_client_links(client, &link, 1, sizeof link, &count), "links");
    printf("%u links of what was fetched ahead\n", (unsigned)count);

    kvf_lease lease = {source.address, asker.lease};
    kvf_release_call release = {sizeof release, 0, &lease, 1};
    kvf_result_free(run(queue, KVF_RELEASE, &release));
    kvf_paths *paths;
    kvf_node_path path = {.size = sizeof path};
    kvf_path_traffic carried = {.size = sizeof carried};
    check(kvf_client_paths(client, &paths), "paths");
    check(kvf_paths_node(paths, 0, &path), "path");
    check(kvf_paths_traffic(paths, 0, &carried), "carried");
    printf("path %u, %s, %s bytes than the blocks have\n", (unsigned)path.path,
           strncmp(path.reason, path.address, strlen(path.address)) == 0 ? "with its reason" : "without",
           carried.path == path.path && carried.fetched_bytes > (FETCHES + 1) * SLICES * bytes ? "more" : "fewer");
    kvf_paths_free(paths);
    printf("done\n");
    fflush(stdout);

    while (getchar() != EOF) continue;
    kvf_reporter_free(reporter);
    kvf_result_free(routed);
    kvf_queue_free(queue);
    kvf_client_free(client);
    free(memory);
    return 0;
}
