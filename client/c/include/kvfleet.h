/* kvfleet.h - the client of kvfleet for engines: route, fetch into your memory, save from your memory, release.
 *
 * Operations are submitted under a tag and polled; the library makes no callbacks. docs/guide/engines.md describes the
 * order of calls.
 *
 * Handles. This library creates and frees them: kvf_client, kvf_queue, kvf_hasher, kvf_result, kvf_prefill,
 * kvf_layer_save, kvf_reporter and kvf_paths.
 *
 * Structs. A struct with a field `size` begins with it; set it to sizeof the struct. A newer library accepts the
 * smaller struct of an older header, and an older library refuses a larger one. In an array of such structs all
 * have the size of the first, which is also their distance. Structs without `size` never change; the size of
 * kvf_completion is an argument. Set fields named `reserved` to 0, otherwise the call is refused.
 *
 * Memory. Everything that a call points to is copied before it returns, except the slices of a fetch, a prefill and
 * a save. These must stay valid and in place until one of these events:
 *   - the KVF_ENDED of the operation was polled, kvf_queue_close returned KVF_OK, or kvf_queue_free returned;
 *   - for a prefill: kvf_prefill_returned named their block or returned KVF_CLOSED, or kvf_prefill_free returned.
 * Until then only the library may use the slices of a fetch or a prefill. You may read a slice that KVF_LAYER,
 * KVF_ARRIVED or kvf_prefill_next reports as present. The slices of a save are read-only for both sides. Slices of
 * a fetch or a prefill must not overlap any others in flight; saves may share slices. All of it is host memory that
 * this process can read and write by address and that was written before (malloc alone is not enough), not device
 * memory. Registering it with a network card or pinning it has no effect: with RDMA too, the library reads into its
 * own memory, verifies, and copies.
 *
 * Threads. Every function may be called from any thread, and several threads may use the same handle. Free a handle
 * once, by one thread, when no other uses it. Poll a queue from one thread, or order entries by tag: of two polling
 * threads, one may hold a KVF_LAYER while the other has processed the later KVF_ENDED.
 *
 * Processes. A client and its queues, reporters, prefills and layer-wise saves belong to the process that opened
 * them. In a forked process every call on them returns KVF_FAILED, and freeing them has no effect: open a new
 * client there. Never dlclose this library: its threads may outlive the last handle by a moment.
 *
 * Errors. Functions return a kvf_status; if it is not KVF_OK, kvf_last_error has a message. Null or misaligned
 * pointers, lengths above their limits and unterminated texts are refused; you guarantee that other pointers are
 * valid. No panic of this library crosses into C: it becomes KVF_PANICKED. */
#ifndef KVFLEET_H
#define KVFLEET_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes when the meaning of this header changes; a library with another number is incompatible. */
#define KVF_ABI_VERSION 7

typedef int32_t kvf_status;
enum {
    KVF_OK = 0,
    /* Of calls. */
    KVF_INVALID = 1,      /* invalid argument: null, misaligned, unknown size, out of range */
    KVF_TOO_LARGE = 2,    /* exceeds a limit and can never be accepted: give less at once */
    KVF_BUSY = 3,         /* does not fit beside the operations in flight: poll ends, then submit again */
    KVF_TAG_IN_USE = 4,   /* an operation in flight has this tag */
    KVF_CLOSED = 5,       /* the queue is closed */
    KVF_NOT_FOUND = 6,    /* no operation in flight has this tag, or a result has no such part */
    KVF_TIMED_OUT = 7,    /* timeout */
    KVF_FAILED = 8,       /* the call failed; the message gives the reason */
    KVF_PANICKED = 9,     /* a bug inside the library; free the handle */
    /* Results of operations, besides KVF_OK and KVF_FAILED. */
    KVF_MISSED = 16,      /* fetch: not all blocks arrived; those before end_block did */
    KVF_REJECTED = 17,    /* route: no instance can accept it now; admit_decode: the time between its tokens would
                           * exceed the limit */
    KVF_NODE_BUSY = 18,   /* save: the node is too busy for it now */
    KVF_REFUSED = 19,     /* save: the node refuses all of it */
    KVF_CANCELLED = 20,   /* cancelled, or its queue was closed */
    KVF_LOST = 21         /* lost to a bug inside the library */
};

typedef struct kvf_client kvf_client;
typedef struct kvf_queue kvf_queue;
typedef struct kvf_hasher kvf_hasher;
typedef struct kvf_result kvf_result;

/* The hash of a block and of everything before it (docs/reference/hash.md). */
typedef struct kvf_hash {
    uint8_t bytes[19];
} kvf_hash;

/* The identity of a model, as nodes and routers compare it. */
typedef struct kvf_identity {
    uint8_t bytes[16];
} kvf_identity;

/* ---- the cluster ---- */

typedef struct kvf_client_config {
    uint32_t size;
    uint32_t threads;            /* threads that run operations; 0 for two */
    const char *const *routers;  /* host:port each */
    size_t routers_count;
    const char *ca_file;         /* PEM files of this process; reloaded periodically */
    const char *cert_file;
    const char *key_file;
    const char *transport;       /* "quic", "tcp", "shm", "rdma" or "auto"; null for "auto". RDMA needs a library
                                  * that was built with it */
    const char *shm_dir;         /* directory of the local nodes' sockets; null for none */
    uint64_t seed;               /* seed of the jitter between retries; 0 derives one from the process */
    const char *rdma_device;     /* RDMA device such as "mlx5_0", with all its ports; "all" for every device; null
                                  * for the best port */
    const char *rdma_near;       /* PCI address of a GPU, such as "0000:17:00.0": among equally good devices the
                                  * nearest to it is preferred; null for none */
    uint64_t rdma_memory_bytes;  /* locked memory for reads and writes, for all devices together, at least 1 MiB; 0
                                  * for 256 MiB */
    const char *network;         /* network path that "auto" prefers, "tcp" or "quic"; null for "tcp". The other one
                                  * is used while this one cannot be reached */
} kvf_client_config;

/* The version of the loaded library: compare it with KVF_ABI_VERSION. */
uint32_t kvf_abi_version(void);

/* Lower-case name of a status; never null. */
const char *kvf_status_name(kvf_status status);

/* Copies the message of the calling thread's last failed call, terminated by a 0, and returns its length without
 * the 0. Nothing is copied to a null `text`. */
size_t kvf_last_error(char *text, size_t text_bytes);

/* Connects at first use. */
kvf_status kvf_client_open(const kvf_client_config *config, kvf_client **client);

/* Frees the handle without waiting. Its queues and prefills continue, and so do finished layer-wise saves, while
 * the process lives. Null is ignored. */
void kvf_client_free(kvf_client *client);

/* ---- hashes of prompts ---- */

typedef struct kvf_model {
    uint32_t size;
    uint32_t key_form;           /* form of the stored keys: 0 before RoPE, 1 after */
    const char *model;           /* all texts as in the nodes' [identity] */
    const char *weights_digest;
    const char *dtype;
    const char *layout;
    const char *rope;
    const char *adapter;         /* "" for none */
    uint32_t layers;
    uint32_t tp;
    uint32_t pp;
    uint32_t rank;
    uint32_t block_tokens;       /* a power of two up to 512 */
    uint32_t reserved;
} kvf_model;

/* `tenant_salt` has 32 bytes; it separates the hashes of tenants. */
kvf_status kvf_hasher_open(const kvf_model *model, const uint8_t *tenant_salt, kvf_hasher **hasher);

kvf_status kvf_hasher_identity(const kvf_hasher *hasher, kvf_identity *identity);

/* The same model with another generation of weights, as counted by `kvfleet weights`. Use it in the fetches and
 * saves of an engine that has loaded this generation. A node with another generation answers with miss reason 9.
 * The hashes of blocks do not depend on the generation. `manifest` is the result of kvf_hasher_identity, never an
 * earlier result of this function. */
static inline kvf_identity kvf_identity_of_generation(kvf_identity manifest, uint32_t generation) {
    for (int at = 0; at < 4; at++) manifest.bytes[12 + at] ^= (uint8_t)(generation >> (8 * at));
    return manifest;
}

/* Hashes of all blocks of a prompt, in order; the last one may be partly filled. `count` is the number of blocks,
 * also if `hashes_count` is less; then the call returns KVF_TOO_LARGE and writes no hash. */
kvf_status kvf_hasher_blocks(const kvf_hasher *hasher, const uint32_t *tokens, size_t tokens_count,
                             kvf_hash *hashes, size_t hashes_count, size_t *count);

void kvf_hasher_free(kvf_hasher *hasher);

/* ---- operations ---- */

/* Context of a request. */
typedef struct kvf_request_context {
    uint64_t request;            /* your number, for traces and reports */
    uint64_t lease;              /* your number; holds blocks on nodes until released or expired */
    uint32_t tenant;
    uint32_t kind;               /* kind of request: 0 text, 1 file, 2 multimodal, 3 search, 4 api, 5 agent, 6
                                  * thinking */
    uint32_t turn;               /* turn of the conversation, from 1; 0 if unknown */
    uint32_t qos;                /* traffic class, as below; decides the order under load. 0 selects the
                                  * operation's own class, the only choice for a route */
    kvf_identity identity;
} kvf_request_context;

enum {
    KVF_QOS_FETCH = 1,           /* a request waits for the blocks; not allowed for a save */
    KVF_QOS_SAVE = 2,            /* new blocks are stored; not allowed for a fetch */
    KVF_QOS_REPLICATE = 3,       /* blocks are copied to another node */
    KVF_QOS_PREFETCH = 4         /* blocks are read or stored before a request needs them; also data loaded under
                                  * KVF_FETCH_DEFERRED */
};

/* The announcement position of a save, from kvf_saved. */
typedef struct kvf_announce_position {
    uint32_t node;
    uint32_t shard;
    uint64_t epoch;
    uint64_t seq;
} kvf_announce_position;

/* A node, and the blocks that it delivers. */
typedef struct kvf_source {
    const char *address;         /* host:port of its data address */
    uint64_t epoch;
    uint32_t node;
    uint32_t tier;               /* 0 SSD, 1 DRAM, 2 GPU */
    uint32_t start_blocks;
    uint32_t len_blocks;
} kvf_source;

/* A lease that a node may hold. */
typedef struct kvf_lease {
    const char *address;
    uint64_t lease;
} kvf_lease;

typedef struct kvf_route_call {
    uint32_t size;
    uint32_t fresh;              /* 1 to answer from committed state, at the cost of a round trip */
    kvf_request_context asker;             /* its lease is not used */
    const kvf_hash *hashes;
    size_t hashes_count;
    const kvf_announce_position *after;       /* saves that the answer must take into account; may be null with 0 */
    size_t after_count;
    uint32_t block_tokens;
    uint32_t input_tokens;       /* tokens of the whole prompt */
    uint32_t output_tokens;      /* maximum output tokens; 0 if unknown */
    uint32_t tbt_max_us;         /* limit of their mean interval in microseconds; a request that cannot meet it is
                                  * rejected. 0 uses the router's setting */
} kvf_route_call;

enum {
    KVF_FETCH_EACH_BLOCK = 1,    /* report each block by KVF_ARRIVED */
    KVF_FETCH_DEFERRED = 2,         /* starts at kvf_queue_begin: until then only the read buffer is filled */
    KVF_FETCH_EACH_LAYER = 4     /* report KVF_LAYER as soon as all awaited blocks have the layer; later layers may
                                  * cover fewer blocks */
};

typedef struct kvf_fetch_call {
    uint32_t size;
    uint32_t flags;
    kvf_request_context asker;
    const kvf_hash *hashes;      /* of the whole request */
    size_t hashes_count;
    const kvf_source *sources;   /* consecutive, from the first block that is not resident */
    size_t sources_count;
    const uint32_t *slice_bytes; /* length of each layer's slice */
    void *const *slices;         /* of the sources' blocks: layers of the first block, then of the second, ... */
    size_t slices_count;         /* blocks of all sources times layers */
    uint32_t layers;             /* slices of a block: twice the model's layers if K and V are separate */
    uint32_t resident_blocks;    /* leading blocks in GPU memory */
    uint64_t deadline_us;        /* from its start, an hour at most; after it recomputing is cheaper */
    uint64_t read_buffer_bytes;  /* loaded before its start */
    uint64_t in_flight_bytes_max; /* limit of outstanding bytes; 0 for none. Layers arrive in order within it */
} kvf_fetch_call;

typedef struct kvf_save_call {
    uint32_t size;
    uint32_t key_form;           /* 0 before RoPE, 1 after: must be the model's form, nodes store no other */
    kvf_request_context asker;             /* its lease is held on the node until released */
    const char *address;         /* data address of the node */
    uint64_t epoch;
    const kvf_hash *parent;      /* hash before the first block; null at the start of a prefix */
    const kvf_hash *hashes;      /* of the blocks to save */
    size_t hashes_count;
    const uint32_t *slice_bytes;
    const void *const *slices;   /* layers of the first block, then of the second, ... */
    size_t slices_count;
    uint32_t layers;
    uint32_t first_offset_blocks; /* offset of the first block in its prefix */
    uint64_t deadline_us;        /* an hour at most; 0 for a minute */
} kvf_save_call;

typedef struct kvf_release_call {
    uint32_t size;
    uint32_t reserved;
    const kvf_lease *leases;
    size_t leases_count;
} kvf_release_call;

/* Asks whether a request with a computed prompt may begin to decode, given the current decode load. It ends KVF_OK
 * if so, or if no router answers within a tenth of a second or knows the request. It ends KVF_REJECTED if the time
 * between its tokens would exceed the limit: then end the request like one that was shed, with kvf_result_message
 * as the reason and kvf_result_retry_after_us. The computed blocks may be saved for a retry. */
typedef struct kvf_admit_decode_call {
    uint32_t size;
    uint32_t instance;           /* instance on which it would decode */
    uint64_t request;            /* the request's number in its route call */
    uint64_t tbt_max_us;         /* limit of the mean interval of its tokens; 0 uses that of the route call */
} kvf_admit_decode_call;

enum { KVF_ROUTE = 1, KVF_FETCH = 2, KVF_SAVE = 3, KVF_RELEASE = 4, KVF_ADMIT_DECODE = 5 };

typedef struct kvf_operation {
    uint32_t size;
    uint32_t kind;
    uint64_t tag;                /* your number; must differ from those of all operations in flight */
    const void *call;            /* kvf_route_call, kvf_fetch_call, kvf_save_call, kvf_release_call or kvf_admit_decode_call */
} kvf_operation;

/* ---- queues ---- */

typedef struct kvf_queue_limits {
    uint32_t size;
    uint32_t reserved;
    uint64_t operations_max;     /* operations with an end not yet polled; 0 for 1024 */
    uint64_t blocks_max;         /* blocks that these name; 0 for 1048576 */
} kvf_queue_limits;

enum {
    KVF_ARRIVED = 1,             /* block: all its slices are present */
    KVF_RECOMPUTE = 2,           /* block: from this one on not all arrive; compute these, in other memory until
                                  * KVF_ENDED */
    KVF_LAYER = 3,               /* layer: present for all blocks of the sources before `block` */
    KVF_ENDED = 4                /* the last entry; no slice is in use any more: see status and result */
};

typedef struct kvf_completion {
    uint64_t tag;
    uint32_t kind;
    kvf_status status;           /* of KVF_ENDED */
    uint32_t block;
    uint32_t layer;
    kvf_result *result;          /* of KVF_ENDED, never null there; you free it */
} kvf_completion;

/* `limits` may be null. */
kvf_status kvf_queue_open(kvf_client *client, const kvf_queue_limits *limits, kvf_queue **queue);

/* Starts all operations, or none. Never waits. */
kvf_status kvf_queue_submit(kvf_queue *queue, const kvf_operation *operations, size_t operations_count);

/* Writes available entries and their number. Never waits. `entry_bytes` is sizeof(kvf_completion). If several
 * threads poll, each gets other entries (see Threads). */
kvf_status kvf_queue_poll(kvf_queue *queue, kvf_completion *entries, size_t entries_count, size_t entry_bytes,
                          size_t *count);

/* The same, but waits for the first entry, up to the timeout and at most an hour, also while no operation is in
 * flight. Returns KVF_OK without entries on timeout, and KVF_CLOSED once the queue is closed and all entries were
 * polled. */
kvf_status kvf_queue_wait(kvf_queue *queue, kvf_completion *entries, size_t entries_count, size_t entry_bytes,
                          uint64_t timeout_us, size_t *count);

/* Starts a fetch that was submitted with KVF_FETCH_DEFERRED. */
kvf_status kvf_queue_begin(kvf_queue *queue, uint64_t tag);

/* Requests cancellation. The operation still ends by KVF_ENDED, and its slices are in use until then. */
kvf_status kvf_queue_cancel(kvf_queue *queue, uint64_t tag);

/* Rejects new operations, cancels all, and waits until no slice is in use, up to the timeout and at most an hour.
 * Returns KVF_OK, or KVF_TIMED_OUT; then call again. Ends can still be polled. */
kvf_status kvf_queue_close(kvf_queue *queue, uint64_t timeout_us);

/* Closes, waits without limit until no slice is in use, and frees. Polled results remain yours. */
void kvf_queue_free(kvf_queue *queue);

/* ---- prefills that overlap with their load ---- */

/* A prefill that computes layer by layer while its history is loaded. On any path it takes no longer than without a
 * cache, except for a bounded loss: a 64th, or two milliseconds if that is more. It needs no queue.
 *
 *   begin                        when the request is routed: the read buffer fills while other requests compute
 *   next, until KVF_STEP_DONE    from its start on: the next step to compute. Calling again confirms the last one
 *   end                          its outcome, and the leases; also at any earlier time, to abandon it
 *   back, until KVF_CLOSED       the blocks with slices that are yours again, each block once
 *   free                         always, at the end. Waits for slices that were not returned
 *
 * Write computed KV of the sources' blocks to other memory until their slices are returned. */
typedef struct kvf_prefill kvf_prefill;

/* Compute times, measured or from a profile. The bound above holds only if these are correct. If K and V are
 * separate, a layer of the model is two layers here, each with half of its time: compute it when the second one is
 * named. */
typedef struct kvf_costs {
    const uint64_t *block_layer_ns; /* one layer of each block of the sources, in order; later blocks attend to
                                     * more */
    size_t blocks_count;
    uint64_t new_layer_ns;       /* one layer of all tokens behind them */
} kvf_costs;

typedef struct kvf_prefill_call {
    uint32_t size;
    uint32_t layers;             /* as in kvf_fetch_call, and so are all fields of the same name */
    kvf_request_context asker;
    const kvf_hash *hashes;
    size_t hashes_count;
    const kvf_source *sources;
    size_t sources_count;
    const uint32_t *slice_bytes;
    void *const *slices;
    size_t slices_count;
    kvf_costs costs;
    uint64_t bytes_per_s;        /* expected of all sources together, until earlier fetches or this one give a
                                  * measurement; 0 for 10^9 */
    uint64_t read_buffer_bytes_max; /* limit of the data loaded before its start */
    uint64_t in_flight_bytes_max;
    uint64_t deadline_us;        /* from its start; at most the time to compute everything, and 0 for that */
    uint32_t resident_blocks;
    uint32_t reserved;
} kvf_prefill_call;

enum {
    KVF_STEP_LAYER = 1,          /* layer: compute it for the new tokens and for these blocks. For all other blocks
                                  * of the sources, this layer and all earlier ones are in their slices */
    KVF_STEP_CATCH_UP = 2,       /* compute the layers before `layer` of these blocks: their slices do not arrive
                                  * in time. Each later layer includes these blocks, unless they arrive after all */
    KVF_STEP_WAIT = 3,           /* no step until data arrives, or for wait_us: call again then */
    KVF_STEP_DONE = 4            /* all layers are computed */
};

typedef struct kvf_step {
    uint32_t size;
    uint32_t kind;
    uint32_t layer;
    uint32_t blocks;             /* number of blocks written: numbers in the request, in ascending order */
    uint64_t wait_us;
} kvf_step;

/* A block with slices that are yours again. */
typedef struct kvf_returned_block {
    uint32_t block;              /* number in the request */
    uint32_t layers;             /* number of leading layers that are present and verified: continue from them, or
                                  * compute them all */
} kvf_returned_block;

kvf_status kvf_prefill_begin(kvf_client *client, const kvf_prefill_call *call, kvf_prefill **prefill);

/* Bytes to load before its start, read_buffer_bytes_max at most: the rest of that is free for other uses. */
uint64_t kvf_prefill_read_buffer_bytes(const kvf_prefill *prefill);

/* The next step to compute; the previous step is done. The first call starts the request: its deadline counts, and
 * the rest is loaded. With a timeout of 0 it never waits; otherwise it waits for a step, up to the timeout and at
 * most an hour, and returns KVF_STEP_WAIT after that. Set `step->size`, and give `blocks` space for all blocks of
 * the sources; otherwise the call has no effect. Call it from one thread at a time. After kvf_prefill_end it
 * returns KVF_CLOSED, also to a thread that waits in it. */
kvf_status kvf_prefill_next(kvf_prefill *prefill, uint64_t timeout_us, kvf_step *step, uint32_t *blocks,
                            size_t blocks_count);

/* Ends the prefill, complete or not, without waiting for data in flight. The result has kvf_result_prefilled, _miss
 * and _lease. A second call returns KVF_CLOSED. */
kvf_status kvf_prefill_end(kvf_prefill *prefill, kvf_result **result);

/* Writes the blocks returned since the last call, each once, and their number. Waits for the first one, up to the
 * timeout and at most an hour. Returns KVF_OK without blocks on timeout, KVF_CLOSED once all were returned, and
 * KVF_INVALID before kvf_prefill_end. `entry_bytes` is sizeof(kvf_returned_block). */
kvf_status kvf_prefill_returned(kvf_prefill *prefill, kvf_returned_block *entries, size_t entries_count, size_t entry_bytes,
                            uint64_t timeout_us, size_t *count);

/* Ends the prefill if necessary; its leases then expire. Waits without limit until no slice is in use, and frees. */
void kvf_prefill_free(kvf_prefill *prefill);

/* ---- layer-wise saves ---- */

/* A save of blocks that are being computed: each layer is copied as it is computed, and the slices are yours again
 * when the call returns. No address is kept, and no queue is needed.
 *
 *   begin                        when the blocks to save are known, before their first layer
 *   put, for each layer          after its compute (in a connector's save_kv_layer)
 *   finish                       after the last layer (in its wait_for_save): the client's threads send the blocks
 *   drop                         always, at the end. Without an earlier finish no block is saved
 *
 * The outcome of a finished save is not reported: blocks that did not reach their node are recomputed later. */
typedef struct kvf_layer_save kvf_layer_save;

typedef struct kvf_save_layers_call {
    uint32_t size;
    uint32_t key_form;           /* as in kvf_save_call, and so are all fields of the same name */
    kvf_request_context asker;             /* its lease is released after the save: use that of the request's fetch, or
                                  * another one */
    const char *address;
    uint64_t epoch;
    const kvf_hash *parent;
    const kvf_hash *hashes;
    size_t hashes_count;
    const uint32_t *slice_bytes;
    const kvf_lease *then_release; /* leases to release after it, besides its own; may be null with 0 */
    size_t then_release_count;
    uint32_t layers;
    uint32_t first_offset_blocks;
    uint64_t deadline_us;        /* from the finish, an hour at most; 0 for a minute */
} kvf_save_layers_call;

/* Reserves library memory for all of the blocks. KVF_BUSY if none is free now: continue without saving them.
 * KVF_TOO_LARGE if it can never fit: the limit is 256 MiB for all frames of a save. */
kvf_status kvf_save_layers_begin(kvf_client *client, const kvf_save_layers_call *call, kvf_layer_save **save);

/* Copies the next layer: a slice of each block, in their order, each as long as slice_bytes gives for that layer.
 * Slices may be null if that is 0. A refused call has no effect and may be repeated; a layer behind the last one is
 * KVF_INVALID. Waits only for another put of the same save. */
kvf_status kvf_save_layers_put(kvf_layer_save *save, const void *const *slices, size_t slices_count);

/* Completes the save after all layers were put: the layers are sent in the background. Never waits. KVF_INVALID if
 * layers are missing, with the save unchanged. After success every call except kvf_save_layers_drop returns
 * KVF_CLOSED. */
kvf_status kvf_save_layers_finish(kvf_layer_save *save);

/* Frees it. A finished save continues, also after the client is freed. */
void kvf_save_layers_drop(kvf_layer_save *save);

/* ---- results ---- */

/* Of a route that ended KVF_OK. */
typedef struct kvf_decision {
    uint32_t size;
    uint32_t instance;
    const char *instance_address; /* this and all texts of a result: valid until it is freed */
    const char *save_address;    /* node to save to; null if there is none */
    uint64_t save_epoch;
    uint32_t save_node;
    uint32_t save_tier;
    uint32_t fetch_blocks;
    uint32_t recompute_blocks;
    uint32_t resident_blocks;
    uint32_t sources;            /* see kvf_result_source */
    uint64_t priority_deadline_ms;            /* Unix time in milliseconds: an instance that keeps an order starts the waiting
                                  * request with the earliest value first */
    const char *handover_address; /* instance that decodes after `instance` has computed the prompt; null if that
                                   * is the same */
    uint64_t handover_us;        /* predicted delay of the first token by the handover */
    uint32_t handover_instance;
    uint32_t reserved;
} kvf_decision;

/* Of a fetch that ended KVF_OK or KVF_MISSED. */
typedef struct kvf_fetched {
    uint32_t size;
    uint32_t end_block;          /* all blocks of the sources before this one arrived */
    const uint8_t *came;         /* by block of the sources: 1 if it arrived */
    size_t came_count;
    uint64_t received_bytes;
    uint32_t wrong_blocks;       /* received blocks that are wrong, or do not fit the slices */
    uint32_t misses;             /* see kvf_result_miss */
} kvf_fetched;

/* Of a prefill that ended. Its message gives the reasons of misses. */
typedef struct kvf_prefilled {
    uint32_t size;
    uint32_t misses;             /* see kvf_result_miss; sources still outstanding are not included */
    const uint8_t *computed;     /* by block of the sources: 1 if it was computed to the end. Its slices may have
                                  * arrived too */
    size_t computed_count;
    uint64_t received_bytes;
    uint64_t idle_us;            /* time during which compute was idle */
    uint64_t saved_us;           /* compute time saved by the cache */
    uint32_t wrong_blocks;       /* received blocks that are wrong, or do not fit the slices */
    uint32_t reserved;
} kvf_prefilled;

/* A source that delivered less than planned. */
typedef struct kvf_miss {
    uint32_t size;
    uint32_t node;
    const char *address;
    uint32_t first_missing_block;
    uint32_t reason; /* 1 not held, 2 stale epoch, 3 other identity, 4 corrupt, 5 too late, 6 node lost, 7 busy, 8
                      * storage failed, 9 other weights of this identity */
} kvf_miss;

/* Of a save that ended KVF_OK. */
typedef struct kvf_saved {
    uint32_t size;
    uint32_t stored_blocks;
    uint32_t present_blocks;     /* were present already */
    uint32_t refused_blocks;
    uint64_t stored_bytes;
    kvf_announce_position visible_at;         /* for kvf_route_call.after; all 0 if no block was stored */
} kvf_saved;

/* KVF_NOT_FOUND if the result is of another kind, or there are fewer parts. */
kvf_status kvf_result_decision(const kvf_result *result, kvf_decision *decision);
kvf_status kvf_result_source(const kvf_result *result, size_t position, kvf_source *source);
kvf_status kvf_result_fetched(const kvf_result *result, kvf_fetched *fetched);
kvf_status kvf_result_prefilled(const kvf_result *result, kvf_prefilled *prefilled);
kvf_status kvf_result_miss(const kvf_result *result, size_t position, kvf_miss *miss);
kvf_status kvf_result_saved(const kvf_result *result, kvf_saved *saved);

/* Leases that nodes may hold now: release them when the request ends. After KVF_CANCELLED the release may reach the
 * node before the fetch does; then the lease expires by itself. */
kvf_status kvf_result_lease(const kvf_result *result, size_t position, kvf_lease *lease);

/* Time after which to retry, for KVF_REJECTED and KVF_NODE_BUSY; otherwise 0. */
uint64_t kvf_result_retry_after_us(const kvf_result *result);

/* The reason of its status, copied as by kvf_last_error; empty for KVF_OK. */
size_t kvf_result_message(const kvf_result *result, char *text, size_t text_bytes);

void kvf_result_free(kvf_result *result);

/* ---- paths and links ---- */

/* Kinds of paths between this process and a node. */
enum { KVF_PATH_SHM = 1, KVF_PATH_RDMA = 2, KVF_PATH_QUIC = 3, KVF_PATH_TCP = 4 };

/* The paths of a client at the time of the call. */
typedef struct kvf_paths kvf_paths;

/* The path of the last operation to a node. */
typedef struct kvf_node_path {
    uint32_t size;
    uint32_t path;               /* as above */
    const char *address;         /* the node's data address; this and `reason` are valid until the kvf_paths is
                                  * freed */
    const char *reason;          /* why this path is used, with the measurements of each path */
} kvf_node_path;

/* Encoded bytes of blocks over one kind of path, to and from all nodes, since the client was opened. */
typedef struct kvf_path_traffic {
    uint32_t size;
    uint32_t path;               /* as above */
    uint64_t fetched_bytes;
    uint64_t saved_bytes;
} kvf_path_traffic;

kvf_status kvf_client_paths(const kvf_client *client, kvf_paths **paths);

/* KVF_NOT_FOUND if there are fewer: nodes in contact so far, and kinds of paths that the client may use. */
kvf_status kvf_paths_node(const kvf_paths *paths, size_t position, kvf_node_path *path);
kvf_status kvf_paths_traffic(const kvf_paths *paths, size_t position, kvf_path_traffic *carried);

void kvf_paths_free(kvf_paths *paths);

/* Totals of fetches from a node, over one path and from one tier; only those that a request waited for. */
typedef struct kvf_link {
    uint64_t epoch;              /* epoch of the node */
    uint64_t latency_us;         /* until the first block, summed over the fetches */
    uint64_t bytes;              /* after the first block of each */
    uint64_t stream_us;          /* from the first block to the last, summed over the fetches */
    uint32_t node;
    uint32_t fetches;
    uint32_t path;               /* as above; 0 if unknown */
    uint32_t tier;               /* 1 SSD, 2 DRAM, 3 GPU; 0 if blocks came from several */
} kvf_link;

/* Writes the totals since the last call on this client, at most 256 at a time: the most recently changed first,
 * others in the next call. `link_bytes` is sizeof(kvf_link). A reporter sends the same totals independently of
 * these calls. */
kvf_status kvf_client_links(kvf_client *client, kvf_link *links, size_t links_count, size_t link_bytes,
                            size_t *count);

/* ---- reports ---- */

/* Reports to every router, periodically on the client's threads: the instance, its load, and the measured speed of
 * this client's reads from nodes. Routers send requests only to instances that report, and use the reports to
 * estimate the cost of fetches. It needs the certificate of this instance: routers refuse others, which only the log
 * shows. */
typedef struct kvf_reporter kvf_reporter;

typedef struct kvf_reporter_config {
    uint32_t size;
    uint32_t instance;           /* its number, unique in the cluster */
    const char *address;         /* where it accepts requests, as in decisions */
    const char *host;            /* its host's name; null for none */
    uint32_t node;               /* its local node, reached without a network */
    uint32_t has_node;           /* 1 if there is one; else 0, and `node` is 0 */
    uint32_t every_ms;           /* report interval, 10000 at most; 0 for 200. Routers exclude an instance that is
                                  * silent for two seconds */
    uint32_t without_links;      /* 1 to omit link measurements */
    uint32_t silent_after_ms;    /* reports pause if a load with running or waiting requests was not set again for
                                  * this long, so a stalled engine gets no more requests. every_ms or more, an hour
                                  * at most; 0 for 10000 */
    uint32_t orders_by_deadline;        /* 1 if it starts waiting requests in the order of the decisions' `priority_deadline_ms`; 0: in
                                  * order of arrival */
    const char *place;           /* its topology path, the largest domain first, as in "zone-a/rack-7/host-3"; four
                                  * names at most. Null for none */
    uint32_t role;               /* 0: prefill and decode, 1: prefill only, 2: decode only */
    uint32_t reserved;
} kvf_reporter_config;

/* The load of an instance. */
typedef struct kvf_load {
    uint32_t size;
    uint32_t running;            /* requests being served */
    uint32_t waiting;            /* requests that wait */
    uint32_t tbt_us;             /* recent mean time between two tokens of a request; 0 if unknown, also for the
                                  * fields below */
    uint64_t queue_tokens;       /* prompt tokens that wait for prefill */
    uint64_t kv_tokens_max;      /* tokens whose KV fits the GPU memory */
    uint64_t kv_tokens;          /* tokens of KV in use by running requests; capped at the maximum */
    uint32_t chunk_tokens;       /* maximum prompt tokens in one step */
    uint32_t reserved;
} kvf_load;

/* Starts with an empty load. */
kvf_status kvf_reporter_open(kvf_client *client, const kvf_reporter_config *config, kvf_reporter **reporter);

/* Sets the load of the next reports, valid for `silent_after_ms`. Call it from the loop that serves requests, also
 * while the load does not change. A load without running and waiting requests stays valid: an engine may block
 * while it waits for requests. Never waits. */
kvf_status kvf_reporter_load(kvf_reporter *reporter, const kvf_load *load);

/* The outcome of a request. Routers learn their predictions from it, and `kvfleet why` shows it. Report it once
 * when the first token is out, with its fetch, and once when the request has ended; or all at the end. If a value
 * is reported twice, the first one counts. */
typedef struct kvf_outcome {
    uint32_t size;
    uint32_t output_tokens;      /* tokens generated; 0 until the request has ended */
    uint64_t request;            /* the request's number in its route call */
    uint64_t ttft_us;            /* time from sending until its first token; 0 if not measured, or reported before */
    uint64_t tbt_us;             /* mean time between two tokens; 0 as above, and until it has ended */
    const kvf_result *fetched;   /* result of its fetch or prefill, for the received blocks and the misses; null if
                                  * it had none, or it was reported before. It remains yours */
} kvf_outcome;

/* Sends it with the next reports, to all routers reachable within seconds. Never waits. */
kvf_status kvf_reporter_outcome(kvf_reporter *reporter, const kvf_outcome *outcome);

/* Sends a final report, after which routers send no more requests; waits at most two seconds for that. */
void kvf_reporter_free(kvf_reporter *reporter);

#ifdef __cplusplus
}
#endif

#endif
