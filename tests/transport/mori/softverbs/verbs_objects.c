/* Protection domains, memory regions, completion queues and queue pairs. */
#include "verbs.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { PAIR_SHIFT = 12, REGION_SHIFT = 16, PAIR_NUMBERS = 0xffffff, POLLS_BEFORE_NAP = 32 };

struct memory_region {
  struct ibv_mr v;
  struct card_region *shared;
};

static uint32_t next_region, next_pair, region_generation, pair_generation;

/* --- memory
 * ------------------------------------------------------------------------------------------------------- */

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
  struct ibv_pd *domain = calloc(1, sizeof *domain);
  domain->context = context;
  return domain;
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *domain) {
  free(domain);
  return 0;
}

static struct card_region *free_region(uint32_t *slot) {
  for (uint32_t i = 1; i < MAX_REGIONS; i++) {
    *slot = 1 + (next_region + i) % (MAX_REGIONS - 1); /* slot 0 stays free: its keys could be 0 */
    if (!atomic_load(&own_card->regions[*slot].key)) {
      next_region = *slot;
      return &own_card->regions[*slot];
    }
  }
  return 0;
}

static struct ibv_mr *register_memory(struct ibv_pd *domain, void *address, size_t length, uint32_t access) {
  struct memory_region *m = 0;
  uint32_t slot;
  int error = (int)atomic_exchange(&knobs[REG_ERRNO], 0);
  if (error) {
    errno = error;
    return 0;
  }
  pthread_mutex_lock(&nic);
  struct card_region *shared = free_region(&slot);
  if (shared) {
    m = calloc(1, sizeof *m);
    shared->address = (uintptr_t)address;
    shared->length = length;
    shared->access = access;
    m->shared = shared;
    m->v.context = domain->context;
    m->v.pd = domain;
    m->v.addr = address;
    m->v.length = length;
    m->v.lkey = m->v.rkey = slot | ++region_generation << REGION_SHIFT;
    atomic_store(&shared->key, m->v.rkey);
    knobs[N_MR]++;
  }
  pthread_mutex_unlock(&nic);
  errno = ENOMEM;
  return m ? &m->v : 0;
}

EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *domain, void *address, size_t length, int access) {
  return register_memory(domain, address, length, access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *domain, void *address, size_t length, uint64_t iova,
                                       unsigned access) {
  if (iova == (uintptr_t)address)
    return register_memory(domain, address, length, access);
  errno = EOPNOTSUPP;
  return 0;
}

EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *domain, uint64_t offset, size_t length, uint64_t iova,
                                        int fd, int access) {
  (void)domain, (void)offset, (void)length, (void)iova, (void)fd, (void)access;
  errno = EOPNOTSUPP;
  return 0;
}

EXPORT int ibv_dereg_mr(struct ibv_mr *memory) {
  struct memory_region *m = (struct memory_region *)memory;
  pthread_mutex_lock(&nic);
  atomic_store(&m->shared->key, 0);
  knobs[N_MR]--;
  pthread_mutex_unlock(&nic);
  free(m);
  return 0;
}

/* --- completion queues
 * -------------------------------------------------------------------------------------------- */

EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
  struct ibv_comp_channel *channel = calloc(1, sizeof *channel);
  channel->context = context;
  channel->fd =
      eventfd(1, EFD_CLOEXEC); /* readable for ever: the reader polls the queue, which is all it asks */
  return channel;
}

EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) {
  close(channel->fd);
  free(channel);
  return 0;
}

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *cookie,
                                    struct ibv_comp_channel *channel, int vector) {
  struct completion_queue *q = calloc(1, sizeof *q);
  (void)vector;
  q->v.context = context;
  q->v.channel = channel;
  q->v.cq_context = cookie;
  q->v.cqe = entries;
  q->capacity = entries + 1;
  q->ring = calloc(q->capacity, sizeof *q->ring);
  pthread_mutex_init(&q->lock, 0);
  return &q->v;
}

EXPORT int ibv_destroy_cq(struct ibv_cq *queue) {
  struct completion_queue *q = (struct completion_queue *)queue;
  free(q->ring);
  free(q);
  return 0;
}

EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **queue, void **cookie) {
  int found = 0;
  pthread_mutex_lock(&nic);
  for (struct queue_pair *pair = all_pairs; pair && !found; pair = pair->next)
    if (pair->v.send_cq->channel == channel) {
      *queue = pair->v.send_cq;
      *cookie = pair->v.send_cq->cq_context;
      found = 1;
    }
  pthread_mutex_unlock(&nic);
  errno = EAGAIN;
  return found ? 0 : -1;
}

EXPORT void ibv_ack_cq_events(struct ibv_cq *queue, unsigned count) {
  (void)queue, (void)count;
}

int poll_completions(struct ibv_cq *queue, int room, struct ibv_wc *out) {
  struct completion_queue *q = (struct completion_queue *)queue;
  int count = 0;
  pthread_mutex_lock(&q->lock);
  while (count < room && q->tail < q->head) {
    struct completion *c = &q->ring[q->tail++ % q->capacity];
    out[count++] = c->wc;
    if (c->index && c->index > atomic_load(&c->pair->polled))
      atomic_store(&c->pair->polled, c->index);
  }
  pthread_mutex_unlock(&q->lock);
  q->idle = count ? 0 : q->idle + 1;
  if (q->idle > POLLS_BEFORE_NAP && knobs[NAP_US])
    usleep(knobs[NAP_US]); /* the engine polls without pause: a small machine has other things to do */
  return count;
}

/* --- queue pairs
 * -------------------------------------------------------------------------------------------------- */

EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *domain, struct ibv_srq_init_attr *attributes) {
  (void)domain, (void)attributes;
  errno = EOPNOTSUPP;
  return 0;
}

EXPORT int ibv_destroy_srq(struct ibv_srq *queue) {
  (void)queue;
  return EOPNOTSUPP;
}

static struct card_pair *free_pair(uint32_t *slot) {
  for (uint32_t i = 1; i < MAX_PAIRS; i++) {
    *slot = 1 + (next_pair + i) % (MAX_PAIRS - 1);
    if (!atomic_load(&own_card->pairs[*slot].number)) {
      next_pair = *slot;
      return &own_card->pairs[*slot];
    }
  }
  return 0;
}

static int fits(const struct ibv_qp_init_attr *a) {
  return a->qp_type == IBV_QPT_RC && a->cap.max_send_wr <= knobs[MAX_QP_WR] &&
         a->cap.max_recv_wr <= knobs[MAX_QP_WR] && a->cap.max_send_sge <= MAX_SGE &&
         a->cap.max_inline_data <= MAX_INLINE;
}

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *a) {
  struct queue_pair *q = 0;
  uint32_t slot;
  if (!fits(a)) {
    errno = EINVAL;
    return 0;
  }
  pthread_mutex_lock(&nic);
  struct card_pair *shared = free_pair(&slot);
  if (shared) {
    q = calloc(1, sizeof *q);
    q->shared = shared;
    q->v.context = domain->context;
    q->v.pd = domain;
    q->v.qp_context = a->qp_context;
    q->v.send_cq = a->send_cq;
    q->v.recv_cq = a->recv_cq;
    q->v.qp_type = a->qp_type;
    q->v.state = IBV_QPS_RESET;
    q->v.qp_num = (slot | ++pair_generation << PAIR_SHIFT) & PAIR_NUMBERS;
    a->cap.max_send_wr += !a->cap.max_send_wr;
    q->cap = a->cap;
    q->signal_all = a->sq_sig_all;
    q->requests = calloc(q->cap.max_send_wr, sizeof *q->requests);
    pthread_mutex_init(&q->lock, 0);
    atomic_store(&shared->event, 0);
    atomic_store(&shared->state, IBV_QPS_RESET);
    atomic_store(&shared->number, q->v.qp_num);
    q->next = all_pairs;
    all_pairs = q;
    knobs[N_QP]++;
  }
  pthread_mutex_unlock(&nic);
  errno = ENOMEM;
  return q ? &q->v : 0;
}

EXPORT int ibv_destroy_qp(struct ibv_qp *pair) {
  struct queue_pair *q = (struct queue_pair *)pair, **at = &all_pairs;
  struct completion_queue *cq = (struct completion_queue *)pair->send_cq;
  pthread_mutex_lock(&nic);
  while (*at != q)
    at = &(*at)->next;
  *at = q->next;
  pthread_mutex_lock(&cq->lock);
  for (uint64_t i = cq->tail; i < cq->head; i++)
    if (cq->ring[i % cq->capacity].pair == q)
      cq->ring[i % cq->capacity].index = 0;
  pthread_mutex_unlock(&cq->lock);
  atomic_store(&q->shared->state, IBV_QPS_RESET);
  atomic_store(&q->shared->number, 0);
  knobs[N_QP]--;
  pthread_mutex_unlock(&nic);
  free(q->requests);
  free(q);
  return 0;
}

static int to_ready(struct queue_pair *q, const struct ibv_qp_attr *a, int mask) {
  if (q->v.state != IBV_QPS_INIT || !(mask & IBV_QP_AV) || !(mask & IBV_QP_DEST_QPN))
    return EINVAL;
  q->peer = find_peer(&a->ah_attr.grh.dgid);
  q->peer_slot = a->dest_qp_num & (MAX_PAIRS - 1);
  q->shared->peer_number = a->dest_qp_num;
  return q->peer ? 0 : EHOSTUNREACH;
}

EXPORT int ibv_modify_qp(struct ibv_qp *pair, struct ibv_qp_attr *a, int mask) {
  struct queue_pair *q = (struct queue_pair *)pair;
  int error = 0;
  if (!(mask & IBV_QP_STATE))
    return 0;
  pthread_mutex_lock(&nic);
  if (a->qp_state == IBV_QPS_RTR)
    error = to_ready(q, a, mask);
  else if (a->qp_state == IBV_QPS_INIT && pair->state != IBV_QPS_RESET)
    error = EINVAL;
  else if (a->qp_state == IBV_QPS_RTS && pair->state != IBV_QPS_RTR)
    error = EINVAL;
  if (a->qp_state == IBV_QPS_RTS && (mask & IBV_QP_TIMEOUT))
    q->patience_us = a->timeout ? (4096ull << a->timeout) / 1000 * (a->retry_cnt + 1u) : ~0ull;
  if (!error) {
    pair->state = a->qp_state;
    atomic_store(&q->shared->state, a->qp_state);
  }
  pthread_mutex_unlock(&nic);
  ring_bell();
  return error;
}

EXPORT int ibv_query_qp(struct ibv_qp *pair, struct ibv_qp_attr *a, int mask, struct ibv_qp_init_attr *init) {
  (void)mask, (void)init;
  memset(a, 0, sizeof *a);
  a->qp_state = pair->state;
  return 0;
}

/* Copy a work request into its slot; 0, or an errno. */
static int take(struct queue_pair *q, const struct ibv_send_wr *w) {
  if (w->num_sge > (int)q->cap.max_send_sge || w->num_sge > MAX_SGE)
    return EINVAL;
  if (q->posted - atomic_load(&q->polled) >= q->cap.max_send_wr)
    return ENOMEM;
  struct request *r = &q->requests[q->posted % q->cap.max_send_wr];
  r->id = w->wr_id;
  r->opcode = w->opcode;
  r->flags = w->send_flags;
  r->index = q->posted;
  r->remote = w->wr.rdma.remote_addr;
  r->key = w->wr.rdma.rkey;
  r->length = 0;
  r->pieces = w->num_sge;
  for (int i = 0; i < w->num_sge; i++) {
    r->piece[i] = w->sg_list[i];
    if (w->send_flags & IBV_SEND_INLINE) {
      if (r->length + w->sg_list[i].length > q->cap.max_inline_data)
        return ENOMEM;
      memcpy(r->inlined + r->length, (void *)(uintptr_t)w->sg_list[i].addr, w->sg_list[i].length);
      r->piece[i].addr = (uintptr_t)r->inlined + r->length;
    }
    r->length += w->sg_list[i].length;
  }
  q->posted++;
  knobs[N_POST]++;
  return 0;
}

int post_send(struct ibv_qp *pair, struct ibv_send_wr *w, struct ibv_send_wr **bad) {
  struct queue_pair *q = (struct queue_pair *)pair;
  int error = (int)atomic_exchange(&knobs[POST_ERRNO], 0);
  if (pair->state != IBV_QPS_RTS && pair->state != IBV_QPS_ERR)
    error = EINVAL;
  pthread_mutex_lock(&q->lock);
  for (; w && !error; w = error ? w : w->next)
    error = take(q, w);
  pthread_mutex_unlock(&q->lock);
  if (error && bad)
    *bad = w;
  ring_bell();
  return error;
}

int post_receive(struct ibv_qp *pair, struct ibv_recv_wr *w, struct ibv_recv_wr **bad) {
  (void)pair, (void)w, (void)bad;
  return 0; /* nobody sends */
}

EXPORT const char *ibv_wc_status_str(enum ibv_wc_status status) {
  static const char *const text[] = {
      [IBV_WC_SUCCESS] = "success",
      [IBV_WC_LOC_LEN_ERR] = "local length error",
      [IBV_WC_LOC_QP_OP_ERR] = "local QP operation error",
      [IBV_WC_LOC_PROT_ERR] = "local protection error",
      [IBV_WC_WR_FLUSH_ERR] = "Work Request Flushed Error",
      [IBV_WC_REM_ACCESS_ERR] = "remote access error",
      [IBV_WC_RETRY_EXC_ERR] = "transport retry counter exceeded",
  };
  return status < sizeof text / sizeof *text && text[status] ? text[status] : "other error";
}
