/* Software verbs: a libibverbs without a device, enough for the MoRI-IO engine with its notification off.
 *
 * Made-up RoCE devices; an RC queue pair moves bytes with memmove (peer in this process) or process_vm_readv
 * and process_vm_writev (peer in another process of this host).  Memory regions and queue pairs of a process
 * lie in a memfd, its "card"; the GID carries pid, memfd number and a nonce, so that a peer finds the card as
 * /proc/<pid>/fd/<n>.  Work requests are executed by one thread per process: a post returns before its end
 * exists.
 *
 * Faithful on purpose: checks of keys, bounds and access; the depth of the send queue (a slot comes back when
 * a later signalled completion is polled); completions only for signalled or failed work requests; the error
 * state with its flushes; "retry exceeded" after a while when the peer is silent; the responder's error event
 * on an access error. Not there: SEND and RECV, UD, atomics, shared receive queues, memory windows, dmabuf,
 * congestion, loss, fork.
 *
 * For tests, by ctypes: softverbs_set(name, value), softverbs_get(name), softverbs_event(ibv_event_type).
 */
#ifndef SOFTVERBS_H
#define SOFTVERBS_H
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#undef ibv_reg_mr
#undef ibv_query_port

#define EXPORT __attribute__((visibility("default")))

enum {
  MAX_REGIONS = 1 << 16, /* powers of two: the low bits of a key and of a queue pair's number are its slot */
  MAX_PAIRS = 1 << 12,
  MAX_SGE = 32,
  MAX_INLINE = 220,
  MAX_PEERS = 256,
  MAX_DEVICES = 8,
  MAX_EVENTS = 256,
};

/* --- what other processes see
 * ---------------------------------------------------------------------------------- */

struct card_region {
  _Atomic uint32_t key; /* 0: free */
  uint32_t access;
  uint64_t address, length;
};

struct card_pair {
  _Atomic uint32_t number; /* 0: free */
  _Atomic uint32_t state;  /* enum ibv_qp_state */
  _Atomic uint32_t event;  /* 1 + the ibv_event_type that a peer's bad request raises here */
  uint32_t peer_number;
};

struct card {
  uint32_t magic, pid, nonce;
  struct card_region regions[MAX_REGIONS];
  struct card_pair pairs[MAX_PAIRS];
};

/* --- private
 * ----------------------------------------------------------------------------------------------------- */

struct peer {
  uint32_t pid, nonce;
  int pidfd; /* readable when the process has ended; -1 for ourselves */
  struct card *card;
};

struct request { /* a work request in a send queue */
  uint64_t id, remote, length, index;
  uint32_t key, flags;
  int opcode, pieces;
  struct ibv_sge piece[MAX_SGE];
  char inlined[MAX_INLINE];
};

struct queue_pair {
  struct ibv_qp v;
  struct card_pair *shared;
  struct peer *peer;
  uint32_t peer_slot;
  pthread_mutex_t lock;
  struct ibv_qp_cap cap;
  int signal_all;
  struct request *requests; /* ring of cap.max_send_wr */
  uint64_t posted, run;     /* requests accepted, and executed */
  _Atomic uint64_t polled;  /* up to here slots are free again */
  uint64_t silent_since, patience_us;
  struct queue_pair *next;
};

struct completion {
  struct ibv_wc wc;
  struct queue_pair *pair;
  uint64_t index; /* 0: the pair is gone */
};

struct completion_queue {
  struct ibv_cq v;
  pthread_mutex_t lock;
  struct completion *ring;
  uint32_t capacity;
  uint64_t head, tail;
  unsigned idle; /* polls in vain */
};

struct context {
  struct ibv_context v;
  int device;
  pthread_mutex_t lock;
  struct ibv_async_event events[MAX_EVENTS];
  unsigned head, tail;
  struct context *next;
};

enum knob {             /* names: see verbs_device.c */
            DELAY_US,   /* before each work request */
            HANG,       /* 1: execute nothing */
            FAIL_NEXT,  /* ibv_wc_status of the next RDMA request, once */
            POST_ERRNO, /* ibv_post_send fails with it, once */
            REG_ERRNO,  /* ibv_reg_mr fails with it, once */
            RETRY_MS,   /* patience with a silent peer; 0: as the queue pair's attributes say */
            MAX_QP_WR,
            MAX_MSG_SZ,
            PORT_DOWN,
            NAP_US, /* pause of a busy poller after polls in vain; 0: none */
            N_WRITE,
            N_READ,
            N_BYTES,
            N_QP,
            N_MR,
            N_POST,
            KNOBS,
};

extern _Atomic long knobs[KNOBS];
extern struct card *own_card;
extern pthread_mutex_t nic; /* before pair.lock, before completion_queue.lock */
extern struct queue_pair *all_pairs;

void start_once(void);
void start_card(void);
void ring_bell(void);
void fail_pair(struct queue_pair *pair);
void push_event(struct ibv_context *context, enum ibv_event_type type, struct queue_pair *pair, int port);
union ibv_gid own_gid(int device);
struct peer *find_peer(const union ibv_gid *gid);
int poll_completions(struct ibv_cq *queue, int room, struct ibv_wc *out);
int post_send(struct ibv_qp *pair, struct ibv_send_wr *request, struct ibv_send_wr **bad);
int post_receive(struct ibv_qp *pair, struct ibv_recv_wr *request, struct ibv_recv_wr **bad);
#endif
