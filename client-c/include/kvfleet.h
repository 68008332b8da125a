/* kvfleet.h - the client of kvfleet for engines: route, fetch into your memory, save out of it, release.
 *
 * Operations are submitted under a tag and polled; nothing here calls back. docs/ENGINES.md tells the same in order.
 *
 * Handles (kvf_client, kvf_queue, kvf_hasher, kvf_result, kvf_prefill, kvf_layer_save, kvf_reporter, kvf_paths) are made and freed by this library. Structs with a field
 * `size` begin with it, and you set it to sizeof the struct: a release that knows more of it takes the smaller one,
 * one that knows less of it refuses it. In an array of such structs all have the size of the first, which is how far
 * they are apart. Structs without it never change; kvf_completion's size is an argument. Fields named `reserved` are 0,
 * or the call is refused.
 *
 * Memory. What a call points to is copied before it returns, except the slices of a fetch, a prefill and a save. These
 * stay valid and in place until the KVF_ENDED of the operation was polled, or kvf_queue_close said KVF_OK, or
 * kvf_queue_free returned; those of a prefill until kvf_prefill_back named their block, or said KVF_CLOSED, or
 * kvf_prefill_free returned. Until then those of a fetch or a prefill are the library's alone, but for what KVF_LAYER or KVF_ARRIVED
 * or kvf_prefill_next say is there, which you may read; and those of a save are read-only for everybody, you included. Slices of a fetch
 * or a prefill overlap no others in flight; saves may share theirs. All of it is memory that this process can read and write by
 * address, and that was written at some time (malloc alone does not): not of a device. That you registered it with a network card
 * or pinned it changes nothing: over RDMA too bytes are read into memory of the library, proven there, and copied.
 *
 * Threads. Every function may be called from any thread. The same handle may be used by several threads at once; it
 * is freed once, by one thread, when no other uses it. One thread polls a queue, or those that do put entries in order
 * by tag: of two threads, one may hold a KVF_LAYER while the other is done with the KVF_ENDED behind it.
 *
 * Processes. A client, its queues, its reporters, its prefills and its saves by layers belong to the process that opened them. In one that was forked
 * from it every call on them is KVF_FAILED, and freeing them does nothing: open a client there. Never dlclose this library: its threads
 * may outlive the last handle by a moment.
 *
 * Errors. Functions give a kvf_status and, for what is not KVF_OK, leave a sentence in kvf_last_error. A pointer that
 * is null or misaligned, a length above its limit, a text without end are refused; that other pointers are valid is
 * your part. No panic of this library crosses into C: it comes back as KVF_PANICKED.
 */
#ifndef KVFLEET_H
#define KVFLEET_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when what is here means something else; a library of another number is of no use. */
#define KVF_ABI_VERSION 5

typedef int32_t kvf_status;
enum {
    KVF_OK = 0,
    /* Of calls. */
    KVF_INVALID = 1,      /* an argument is wrong: null, misaligned, of an unknown size, out of range */
    KVF_TOO_LARGE = 2,    /* it would never be taken: give less at once */
    KVF_BUSY = 3,         /* it does not fit beside what is in flight: poll ends, then submit again */
    KVF_TAG_IN_USE = 4,   /* an operation in flight has this tag */
    KVF_CLOSED = 5,       /* the queue is closed */
    KVF_NOT_FOUND = 6,    /* no operation in flight has this tag, or a result has no such part */
    KVF_TIMED_OUT = 7,    /* not in the time given */
    KVF_FAILED = 8,       /* what was asked failed; the message says why */
    KVF_PANICKED = 9,     /* a mistake inside the library; the handle may be freed, and should be */
    /* Of operations that ended, besides KVF_OK and KVF_FAILED. */
    KVF_MISSED = 16,      /* fetch: not all blocks came. Those before end_block did */
    KVF_REJECTED = 17,    /* route: no instance can take it now; may_decode: its tokens would come too far apart */
    KVF_NODE_BUSY = 18,   /* save: the node has no time for it now */
    KVF_REFUSED = 19,     /* save: the node takes nothing of it */
    KVF_CANCELLED = 20,   /* it was cancelled, or its queue closed */
    KVF_LOST = 21         /* it broke inside the library */
};

typedef struct kvf_client kvf_client;
typedef struct kvf_queue kvf_queue;
typedef struct kvf_hasher kvf_hasher;
typedef struct kvf_result kvf_result;

typedef struct kvf_hash {
    uint8_t bytes[16];
} kvf_hash;

/* ---- the cluster ---- */

typedef struct kvf_client_config {
    uint32_t size;
    uint32_t threads;            /* that run operations; 0 for two */
    const char *const *routers;  /* host:port each */
    size_t routers_count;
    const char *ca_file;         /* PEM files of this process; looked at again now and then */
    const char *cert_file;
    const char *key_file;
    const char *transport;       /* "quic", "tcp", "shm", "rdma" or "auto"; null for "auto". "rdma", and RDMA under "auto", only in a
                                  * library that was built with it */
    const char *shm_dir;         /* where the sockets of this host's nodes are; null for none */
    uint64_t seed;               /* of the jitter between retries; 0 for one of the process */
    const char *rdma_device;     /* all of whose ports are used, such as "mlx5_0"; "all" for each device; null for the best port */
    const char *rdma_near;       /* PCI address of a GPU, such as "0000:17:00.0": of equally good devices the nearest is taken;
                                  * null for none */
    uint64_t rdma_memory_bytes;  /* that is locked for reads and writes, for all devices together, at least 1 MiB; 0 for 256 MiB */
} kvf_client_config;

/* The number of the library that is loaded: compare it with KVF_ABI_VERSION. */
uint32_t kvf_abi_version(void);

/* Lower-case name of a status; never null. */
const char *kvf_status_name(kvf_status status);

/* Copies the message of the calling thread's last call whose kvf_status was not KVF_OK, ends it with a 0, and gives
 * its whole length without that; nothing is copied to a null `text`. */
size_t kvf_last_error(char *text, size_t text_bytes);

/* Connects when first used. */
kvf_status kvf_client_open(const kvf_client_config *config, kvf_client **client);

/* Gives the handle back; its queues and prefills go on, and so do saves by layers that were finished, as long as the process does. Waits for none
 * of them. Null is nothing. */
void kvf_client_free(kvf_client *client);

/* ---- hashes of prompts ---- */

typedef struct kvf_model {
    uint32_t size;
    uint32_t key_form;           /* of the keys that are stored: 0 before RoPE, 1 after */
    const char *model;           /* all texts as the nodes' [identity] has them */
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

/* `tenant_salt` has 32 bytes, which keep the hashes of tenants apart. */
kvf_status kvf_hasher_open(const kvf_model *model, const uint8_t *tenant_salt, kvf_hasher **hasher);

/* The model in 16 bytes, as nodes and routers compare it. */
kvf_status kvf_hasher_identity(const kvf_hasher *hasher, kvf_hash *identity);

/* The same model with weights of this generation, which `kvfleet weights` counts from 0: to be named by fetches and saves of
 * an engine that has those loaded. Nodes tell one that names another what it misses by reason 9. Other weights leave the hashes
 * of blocks as they are. `manifest` is what kvf_hasher_identity gives, never what this returned before. */
static inline kvf_hash kvf_identity_of_generation(kvf_hash manifest, uint32_t generation) {
    for (int at = 0; at < 4; at++) manifest.bytes[12 + at] ^= (uint8_t)(generation >> (8 * at));
    return manifest;
}

/* Hashes of all blocks of a prompt, in order; the last one may be partly filled. `count` is how many there are, also
 * where `hashes_count` is less, which is KVF_TOO_LARGE and writes none. */
kvf_status kvf_hasher_blocks(const kvf_hasher *hasher, const uint32_t *tokens, size_t tokens_count,
                             kvf_hash *hashes, size_t hashes_count, size_t *count);

void kvf_hasher_free(kvf_hasher *hasher);

/* ---- operations ---- */

/* Who asks, for what. */
typedef struct kvf_asker {
    uint64_t request;            /* yours: for traces and reports */
    uint64_t lease;              /* yours: holds blocks on nodes until released; ends by itself after a time */
    uint32_t tenant;
    uint32_t kind;               /* of request: 0 text, 1 file, 2 multimodal, 3 search, 4 api, 5 agent, 6 thinking */
    uint32_t turn;               /* of the conversation, from 1; 0 when unknown */
    uint32_t qos;                /* what the operation is for, as below: who goes first where not all can. 0 is what it is
                                  * called; a route has no other */
    kvf_hash identity;
} kvf_asker;

enum {
    KVF_QOS_FETCH = 1,           /* a request waits for the blocks; no save is that */
    KVF_QOS_SAVE = 2,            /* blocks that were computed are kept; no fetch is that */
    KVF_QOS_REPLICATE = 3,       /* they are copied to another node */
    KVF_QOS_PREFETCH = 4         /* they are read, or kept, before anybody asks for them. So is what KVF_FETCH_WAITS loads */
};

/* A save that was seen: kvf_saved has it. */
typedef struct kvf_seen {
    uint32_t node;
    uint32_t shard;
    uint64_t epoch;
    uint64_t seq;
} kvf_seen;

/* A node, and which blocks come from it. */
typedef struct kvf_source {
    const char *address;         /* host:port of its data */
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
    uint32_t fresh;              /* 1 to answer from what is committed now, at the price of a round trip */
    kvf_asker asker;             /* its lease is not used */
    const kvf_hash *hashes;
    size_t hashes_count;
    const kvf_seen *after;       /* saves whose effect the answer must have seen; may be null with 0 */
    size_t after_count;
    uint32_t block_tokens;
    uint32_t input_tokens;       /* of the whole prompt */
    uint32_t output_tokens;      /* at most; 0 when unknown */
    uint32_t tbt_max_us;         /* how far apart these may come, on average; where that cannot be, the call is rejected. 0: as the
                                  * router is set */
} kvf_route_call;

enum {
    KVF_FETCH_EACH_BLOCK = 1,    /* tell KVF_ARRIVED of each block */
    KVF_FETCH_WAITS = 2,         /* its turn is at kvf_queue_begin: until then only the read buffer is filled */
    KVF_FETCH_EACH_LAYER = 4     /* KVF_LAYER as soon as all awaited blocks have the layer; later ones may name a lesser block */
};

typedef struct kvf_fetch_call {
    uint32_t size;
    uint32_t flags;
    kvf_asker asker;
    const kvf_hash *hashes;      /* of the whole request */
    size_t hashes_count;
    const kvf_source *sources;   /* one after the other, from the first block that is not resident */
    size_t sources_count;
    const uint32_t *slice_bytes; /* length of each layer's slice */
    void *const *slices;         /* of the sources' blocks: layers of the first block, then of the second, ... */
    size_t slices_count;         /* blocks of all sources times layers */
    uint32_t layers;             /* slices of a block: twice the model's where K and V lie apart */
    uint32_t resident_blocks;    /* leading blocks that you have already */
    uint64_t deadline_us;        /* from its turn, an hour at most; after it computing is cheaper */
    uint64_t read_buffer_bytes;  /* loaded before its turn */
    uint64_t in_flight_bytes_max; /* asked for at once; 0 for no limit, and layers come in order within it */
} kvf_fetch_call;

typedef struct kvf_save_call {
    uint32_t size;
    uint32_t key_form;           /* 0 before RoPE, 1 after: that of the model, nodes keep no other */
    kvf_asker asker;             /* its lease is held on the node until released */
    const char *address;         /* data address of the node */
    uint64_t epoch;
    const kvf_hash *parent;      /* hash before the first block; null at the start of a prefix */
    const kvf_hash *hashes;      /* of the blocks to save */
    size_t hashes_count;
    const uint32_t *slice_bytes;
    const void *const *slices;   /* layers of the first block, then of the second, ... */
    size_t slices_count;
    uint32_t layers;
    uint32_t first_offset_blocks; /* of the first block in its prefix */
    uint64_t deadline_us;        /* an hour at most; 0 for a minute */
} kvf_save_call;

typedef struct kvf_release_call {
    uint32_t size;
    uint32_t reserved;
    const kvf_lease *leases;
    size_t leases_count;
} kvf_release_call;

/* Whether a request whose prompt is computed may begin to decode, by what decodes there now. It ends KVF_OK if so, and also where no router
 * answers within a tenth of a second, or knows of it; KVF_REJECTED if its tokens would come too far apart: end the request as one that was turned
 * away, with kvf_result_message as the reason and kvf_result_retry_after_us. What was computed may be saved, and is found when it comes again. */
typedef struct kvf_may_decode_call {
    uint32_t size;
    uint32_t instance;           /* where it is to go on */
    uint64_t request;            /* as its route call had it */
    uint64_t tbt_max_us;         /* how far apart its tokens may come, on average; 0: as its route call had it */
} kvf_may_decode_call;

enum { KVF_ROUTE = 1, KVF_FETCH = 2, KVF_SAVE = 3, KVF_RELEASE = 4, KVF_MAY_DECODE = 5 };

typedef struct kvf_operation {
    uint32_t size;
    uint32_t kind;
    uint64_t tag;                /* yours; no other operation in flight may have it */
    const void *call;            /* kvf_route_call, kvf_fetch_call, kvf_save_call, kvf_release_call or kvf_may_decode_call */
} kvf_operation;

/* ---- queues ---- */

typedef struct kvf_queue_limits {
    uint32_t size;
    uint32_t reserved;
    uint64_t operations_max;     /* in flight: submitted, and the end not polled; 0 for 1024 */
    uint64_t blocks_max;         /* that these name; 0 for 1048576 */
} kvf_queue_limits;

enum {
    KVF_ARRIVED = 1,             /* block: all its slices are there */
    KVF_RECOMPUTE = 2,           /* block: from this one on not all come; compute these, elsewhere until KVF_ENDED */
    KVF_LAYER = 3,               /* layer: is there for all blocks of the sources before `block` */
    KVF_ENDED = 4                /* nothing more comes, and no slice is used any more: see status and result */
};

typedef struct kvf_completion {
    uint64_t tag;
    uint32_t kind;
    kvf_status status;           /* of KVF_ENDED */
    uint32_t block;
    uint32_t layer;
    kvf_result *result;          /* of KVF_ENDED, and then not null: yours to free */
} kvf_completion;

/* `limits` may be null. */
kvf_status kvf_queue_open(kvf_client *client, const kvf_queue_limits *limits, kvf_queue **queue);

/* Starts all of these, or nothing. Never waits. */
kvf_status kvf_queue_submit(kvf_queue *queue, const kvf_operation *operations, size_t operations_count);

/* Writes what became of operations and says how many entries that are. Never waits. `entry_bytes` is
 * sizeof(kvf_completion). Of several threads that poll, each gets other entries (see Threads). */
kvf_status kvf_queue_poll(kvf_queue *queue, kvf_completion *entries, size_t entries_count, size_t entry_bytes,
                          size_t *count);

/* The same, but waits for the first at most so long and at most an hour, also while nothing is in flight. None in that
 * time is KVF_OK, and KVF_CLOSED once the queue is closed and all that it ever tells was polled. */
kvf_status kvf_queue_wait(kvf_queue *queue, kvf_completion *entries, size_t entries_count, size_t entry_bytes,
                          uint64_t timeout_us, size_t *count);

/* It is the turn of a fetch that waits. */
kvf_status kvf_queue_begin(kvf_queue *queue, uint64_t tag);

/* Asks an operation to end. It still ends by KVF_ENDED, and its slices are in use until then. */
kvf_status kvf_queue_cancel(kvf_queue *queue, uint64_t tag);

/* Takes nothing more, cancels all, and waits until no slice is in use, at most so long and at most an hour: KVF_OK, or
 * KVF_TIMED_OUT and call again. What ended can still be polled. */
kvf_status kvf_queue_close(kvf_queue *queue, uint64_t timeout_us);

/* Closes, waits until no slice is in use, however long that takes, and frees. Results that were polled stay yours. */
void kvf_queue_free(kvf_queue *queue);

/* ---- prefills beside their load ---- */

/* A prefill that computes layer by layer while its history comes, and never takes longer than if nothing had been cached, but for a 64th
 * of that, or two milliseconds where a 64th is less: whatever the path does. No queue is needed.
 *
 *   begin                        when the request is decided: the read buffer is filled while others compute
 *   next, until KVF_STEP_DONE    from its turn on: what to compute now. Asking again says that it is done
 *   end                          what came of it, and the leases; also at any time before, when nobody wants it any more
 *   back, until KVF_CLOSED       whose slices are yours again, each block once
 *   free                         always, in the end. Waits for slices that did not come back
 *
 * What is computed of the sources' blocks goes elsewhere until their slices came back. */
typedef struct kvf_prefill kvf_prefill;

/* What computing takes: measured, or of a profile. The bound above holds as far as these are right. Where K and V lie apart a layer of
 * the model is two here, each of half its time: compute it when the second is said. */
typedef struct kvf_costs {
    const uint64_t *block_layer_ns; /* one layer of each block of the sources, in order; later ones attend to more */
    size_t blocks_count;
    uint64_t new_layer_ns;       /* one layer of all tokens behind them */
} kvf_costs;

typedef struct kvf_prefill_call {
    uint32_t size;
    uint32_t layers;             /* as in kvf_fetch_call, and so are all fields of the same name */
    kvf_asker asker;
    const kvf_hash *hashes;
    size_t hashes_count;
    const kvf_source *sources;
    size_t sources_count;
    const uint32_t *slice_bytes;
    void *const *slices;
    size_t slices_count;
    kvf_costs costs;
    uint64_t bytes_per_s;        /* expected of all sources together, until earlier fetches or this one say more; 0 for 10^9 */
    uint64_t read_buffer_bytes_max; /* that may be loaded before its turn */
    uint64_t in_flight_bytes_max;
    uint64_t deadline_us;        /* from its turn; never later than computing everything would end, and 0 for that */
    uint32_t resident_blocks;
    uint32_t reserved;
} kvf_prefill_call;

enum {
    KVF_STEP_LAYER = 1,          /* layer: compute it, of the new tokens and of these blocks. Of all other blocks of the sources it is
                                  * in their slices, with all layers before it */
    KVF_STEP_CATCH_UP = 2,       /* compute the layers before `layer` of these blocks, whose slices do not come in time; they are among
                                  * those of each layer from then on, unless they come after all */
    KVF_STEP_WAIT = 3,           /* nothing to do until something comes, or for wait_us: ask again then */
    KVF_STEP_DONE = 4            /* all layers are computed */
};

typedef struct kvf_step {
    uint32_t size;
    uint32_t kind;
    uint32_t layer;
    uint32_t blocks;             /* how many were written: numbers in the request, in ascending order */
    uint64_t wait_us;
} kvf_step;

/* A block whose slices are yours again. */
typedef struct kvf_back {
    uint32_t block;              /* of the request */
    uint32_t layers;             /* so many leading ones are there, and right: go on from them, or compute them all */
} kvf_back;

kvf_status kvf_prefill_begin(kvf_client *client, const kvf_prefill_call *call, kvf_prefill **prefill);

/* What is loaded before its turn, read_buffer_bytes_max at most: the rest of that is free for others. */
uint64_t kvf_prefill_read_buffer_bytes(const kvf_prefill *prefill);

/* What to compute now; what was said before is done. The first call says that it is the request's turn: the deadline counts, and the
 * rest is loaded. Never waits with a timeout of 0; else for something to do, at most so long and at most an hour, and then
 * it is KVF_STEP_WAIT. `step->size` is set, and `blocks` has room for all blocks of the sources, or nothing is done. One thread asks
 * at a time. After kvf_prefill_end it is KVF_CLOSED, also for a thread that waits in it. */
kvf_status kvf_prefill_next(kvf_prefill *prefill, uint64_t timeout_us, kvf_step *step, uint32_t *blocks,
                            size_t blocks_count);

/* It is over, done or not: what is still on its way is not waited for. The result has kvf_result_prefilled, _miss and _lease.
 * Once: then it is KVF_CLOSED. */
kvf_status kvf_prefill_end(kvf_prefill *prefill, kvf_result **result);

/* Writes blocks whose slices came back since, each once, and says how many these are; waits for the first at most so long and at most
 * an hour. None in that time is KVF_OK, and KVF_CLOSED once all were told. `entry_bytes` is sizeof(kvf_back). KVF_INVALID before
 * kvf_prefill_end. */
kvf_status kvf_prefill_back(kvf_prefill *prefill, kvf_back *entries, size_t entries_count, size_t entry_bytes,
                            uint64_t timeout_us, size_t *count);

/* Ends it where that was not done, when its leases run out by themselves; waits until no slice is in use, however long that takes, and frees. */
void kvf_prefill_free(kvf_prefill *prefill);

/* ---- saves by layer ---- */

/* Blocks that are saved while they are computed: each layer is taken as it is there, and the slices are yours again when its
 * call returns. Nothing of it is kept by address, and no queue is needed.
 *
 *   begin                        when the blocks to save are known, before their first layer
 *   put, for each layer          behind its compute (where a connector's save_kv_layer is called)
 *   finish                       behind the last one (its wait_for_save): the blocks go out on the client's threads
 *   drop                         always, in the end. Without a finish before it nothing is saved
 *
 * What becomes of a save that was finished is not told: blocks that did not get to their node are computed again. */
typedef struct kvf_layer_save kvf_layer_save;

typedef struct kvf_save_layers_call {
    uint32_t size;
    uint32_t key_form;           /* as in kvf_save_call, and so are all fields of the same name */
    kvf_asker asker;             /* its lease is released behind the save: give that of the request's fetch, or another one */
    const char *address;
    uint64_t epoch;
    const kvf_hash *parent;
    const kvf_hash *hashes;
    size_t hashes_count;
    const uint32_t *slice_bytes;
    const kvf_lease *then_release; /* leases that end behind it, besides its own; may be null with 0 */
    size_t then_release_count;
    uint32_t layers;
    uint32_t first_offset_blocks;
    uint64_t deadline_us;        /* from the finish, an hour at most; 0 for a minute */
} kvf_save_layers_call;

/* Takes room for all of the blocks, in memory of the library. KVF_BUSY when there is none now: go on without saving them.
 * KVF_TOO_LARGE when there never is: 256 MiB of all frames of a save. */
kvf_status kvf_save_layers_begin(kvf_client *client, const kvf_save_layers_call *call, kvf_layer_save **save);

/* Copies the next layer: a slice of each block, in their order, each as long as slice_bytes says of that layer. Slices may be null
 * where that is 0. What is refused takes nothing, and may be put again; a layer behind the last one is KVF_INVALID. Waits for nothing
 * but another put of the same save. */
kvf_status kvf_save_layers_put(kvf_layer_save *save, const void *const *slices, size_t slices_count);

/* All layers were put: what was taken goes out. Does not wait for that. KVF_INVALID while layers are missing, and the save is as it
 * was; after it every call but kvf_save_layers_drop is KVF_CLOSED. */
kvf_status kvf_save_layers_finish(kvf_layer_save *save);

/* Frees it. One that was finished goes on by itself, also when the client is freed. */
void kvf_save_layers_drop(kvf_layer_save *save);

/* ---- results ---- */

/* Of a route that ended KVF_OK. */
typedef struct kvf_decision {
    uint32_t size;
    uint32_t instance;
    const char *instance_address; /* this and all texts of a result: valid until it is freed */
    const char *save_address;    /* of the node to save to; null when there is none */
    uint64_t save_epoch;
    uint32_t save_node;
    uint32_t save_tier;
    uint32_t fetch_blocks;
    uint32_t recompute_blocks;
    uint32_t resident_blocks;
    uint32_t sources;            /* see kvf_result_source */
    uint64_t turn_ms;            /* Unix time in milliseconds: of what waits at an instance that keeps an order, the earliest goes first */
    const char *handover_address; /* of who goes on when `instance` has computed the prompt; null where that is the same */
    uint64_t handover_us;        /* how much later the first token is out for that, as predicted */
    uint32_t handover_instance;
    uint32_t reserved;
} kvf_decision;

/* Of a fetch that ended KVF_OK or KVF_MISSED. */
typedef struct kvf_fetched {
    uint32_t size;
    uint32_t end_block;          /* all blocks of the sources before this one came */
    const uint8_t *came;         /* by block of the sources: 1 if it came */
    size_t came_count;
    uint64_t received_bytes;
    uint32_t wrong_blocks;       /* that came and were not what was asked, or fit no slices */
    uint32_t misses;             /* see kvf_result_miss */
} kvf_fetched;

/* Of a prefill that ended. Why sources fell short is its message. */
typedef struct kvf_prefilled {
    uint32_t size;
    uint32_t misses;             /* see kvf_result_miss; a source that was still awaited says nothing */
    const uint8_t *computed;     /* by block of the sources: 1 if it was computed to the end. Its slices may have come too */
    size_t computed_count;
    uint64_t received_bytes;
    uint64_t idle_us;            /* how long there was nothing to do */
    uint64_t saved_us;           /* computing that was spared */
    uint32_t wrong_blocks;       /* that came and were not what was asked, or fit no slices */
    uint32_t reserved;
} kvf_prefilled;

/* A source that fell short. */
typedef struct kvf_miss {
    uint32_t size;
    uint32_t node;
    const char *address;
    uint32_t first_missing_block;
    uint32_t reason; /* 1 not held, 2 stale epoch, 3 other identity, 4 corrupt, 5 too late, 6 node lost, 7 busy, 8 medium,
                        9 other weights of this identity */
} kvf_miss;

/* Of a save that ended KVF_OK. */
typedef struct kvf_saved {
    uint32_t size;
    uint32_t stored_blocks;
    uint32_t present_blocks;     /* were there already */
    uint32_t refused_blocks;
    uint64_t stored_bytes;
    kvf_seen visible_at;         /* for kvf_route_call.after; all 0 when nothing was stored */
} kvf_saved;

/* KVF_NOT_FOUND when the result is of another kind, or there are fewer parts. */
kvf_status kvf_result_decision(const kvf_result *result, kvf_decision *decision);
kvf_status kvf_result_source(const kvf_result *result, size_t position, kvf_source *source);
kvf_status kvf_result_fetched(const kvf_result *result, kvf_fetched *fetched);
kvf_status kvf_result_prefilled(const kvf_result *result, kvf_prefilled *prefilled);
kvf_status kvf_result_miss(const kvf_result *result, size_t position, kvf_miss *miss);
kvf_status kvf_result_saved(const kvf_result *result, kvf_saved *saved);

/* Leases that nodes may hold now: release them when the request ends. After KVF_CANCELLED that is worth a try: the
 * release may reach the node before the fetch does, and then the lease ends by itself after its time. */
kvf_status kvf_result_lease(const kvf_result *result, size_t position, kvf_lease *lease);

/* When trying again makes sense, of KVF_REJECTED and KVF_NODE_BUSY; else 0. */
uint64_t kvf_result_retry_after_us(const kvf_result *result);

/* Why it ended so, as kvf_last_error; empty for KVF_OK. */
size_t kvf_result_message(const kvf_result *result, char *text, size_t text_bytes);

void kvf_result_free(kvf_result *result);

/* ---- paths and links ---- */

/* What carries blocks between this process and a node. */
enum { KVF_PATH_SHM = 1, KVF_PATH_RDMA = 2, KVF_PATH_QUIC = 3, KVF_PATH_TCP = 4 };

/* What a client knew of its paths when it was asked. */
typedef struct kvf_paths kvf_paths;

/* The path that the last operation to a node took. */
typedef struct kvf_node_path {
    uint32_t size;
    uint32_t path;               /* as above */
    const char *address;         /* of the node's data; this and `reason`: valid until the kvf_paths is freed */
    const char *reason;          /* why it is that one, and what is known of each other, in words and figures */
} kvf_node_path;

/* Encoded bytes of blocks that went over one kind of path, to and from all nodes, since the client was opened. */
typedef struct kvf_carried {
    uint32_t size;
    uint32_t path;               /* as above */
    uint64_t fetched_bytes;
    uint64_t saved_bytes;
} kvf_carried;

kvf_status kvf_client_paths(const kvf_client *client, kvf_paths **paths);

/* KVF_NOT_FOUND when there are fewer: nodes that were met, and kinds of paths that the client may take. */
kvf_status kvf_paths_node(const kvf_paths *paths, size_t position, kvf_node_path *path);
kvf_status kvf_paths_carried(const kvf_paths *paths, size_t position, kvf_carried *carried);

void kvf_paths_free(kvf_paths *paths);

/* What fetches from a node came to, added up: those that a request waited for, over one path, out of one tier. */
typedef struct kvf_link {
    uint64_t epoch;              /* of the node */
    uint64_t latency_us;         /* until the first block, of all fetches together */
    uint64_t bytes;              /* behind the first block of each */
    uint64_t stream_us;          /* from the first block to the last, of all fetches together */
    uint32_t node;
    uint32_t fetches;
    uint32_t path;               /* as above; 0 when unknown */
    uint32_t tier;               /* 1 SSD, 2 DRAM, 3 GPU; 0 where blocks came out of several */
} kvf_link;

/* Writes what came since the call before, of this client, at most 256 at a time: what changed last first, the others with
 * the next call. `link_bytes` is sizeof(kvf_link). A reporter tells routers the same by itself, and takes nothing from here. */
kvf_status kvf_client_links(kvf_client *client, kvf_link *links, size_t links_count, size_t link_bytes,
                            size_t *count);

/* ---- reports ---- */

/* Tells every router that an instance is there, what it is doing, and how fast this client read from nodes, again and again
 * on the client's threads. Routers send requests to instances they hear of, and price fetches by what they hear. For a
 * certificate of the cluster's own: one of tenants is refused by the routers, which only the log says. */
typedef struct kvf_reporter kvf_reporter;

typedef struct kvf_reporter_config {
    uint32_t size;
    uint32_t instance;           /* its number, unique in the cluster */
    const char *address;         /* where it takes requests, as decisions name it */
    const char *host;            /* its host's name; null for none */
    uint32_t node;               /* the node it uses as its own, with no network between */
    uint32_t has_node;           /* 1 if there is one; else 0, and `node` is 0 */
    uint32_t every_ms;           /* time between two reports, 10000 at most; 0 for 200. Routers leave out who was silent for two
                                  * seconds */
    uint32_t without_links;      /* 1 to leave out how fast it read from nodes */
    uint32_t silent_after_ms;    /* when a load with requests that run or wait was not said for so long, nothing is reported until
                                  * it is: an engine that stands still gets no more. every_ms or more, an hour at most; 0 for 10000 */
    uint32_t keeps_order;        /* 1 if it begins what waits in the order of the decisions' `turn_ms`; 0: in that of coming */
    const char *place;           /* what it stands in, the largest first, as in "zone-a/rack-7/host-3"; four names at most. Null for none */
    uint32_t role;               /* 0: it does all of a request, 1: it computes prompts, and another goes on, 2: it goes on */
    uint32_t reserved;
} kvf_reporter_config;

/* What an instance is doing. */
typedef struct kvf_load {
    uint32_t size;
    uint32_t running;            /* requests being served */
    uint32_t waiting;            /* requests that wait */
    uint32_t tbt_us;             /* mean time of late between two tokens of a request; 0 when unknown, as with all below */
    uint64_t queue_tokens;       /* prompt tokens that wait for prefill */
    uint64_t kv_tokens_max;      /* tokens whose KV GPU memory can hold */
    uint64_t kv_tokens;          /* of these, those held for requests that run; more counts as all of them */
    uint32_t chunk_tokens;       /* tokens of prompts in one step, at most */
    uint32_t reserved;
} kvf_load;

/* Begins with a load of nothing. */
kvf_status kvf_reporter_open(kvf_client *client, const kvf_reporter_config *config, kvf_reporter **reporter);

/* What the next reports say, for `silent_after_ms` at most: say it from the loop that serves requests, also while nothing changes.
 * That none runs and none waits is told until something else is said: an engine may wait for requests. Never waits. */
kvf_status kvf_reporter_load(kvf_reporter *reporter, const kvf_load *load);

/* What became of a request: what routers predict of the next ones is learnt from it, and `kvfleet why` has it. Told once when its first token is out, with its
 * fetch, and once when it has ended; or all at the end. Of what is told twice the first word counts. */
typedef struct kvf_outcome {
    uint32_t size;
    uint32_t output_tokens;      /* that it said; 0 until it has ended */
    uint64_t request;            /* as its route call had it */
    uint64_t ttft_us;            /* from when it was sent until its first token; 0 where that was not measured, or was told before */
    uint64_t tbt_us;             /* mean time between two tokens; 0 as above, and until it has ended */
    const kvf_result *fetched;   /* of its fetch or prefill: how much came, and which sources fell short; null where it had none, or that
                                  * was told before. Stays yours */
} kvf_outcome;

/* Told with the next reports, which routers hear that are there within seconds. Never waits. */
kvf_status kvf_reporter_tell(kvf_reporter *reporter, const kvf_outcome *outcome);

/* Says goodbye to the routers, which send no more requests then, and waits two seconds for that at most. */
void kvf_reporter_free(kvf_reporter *reporter);

#ifdef __cplusplus
}
#endif

#endif
