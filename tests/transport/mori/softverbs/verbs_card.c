/* The card: peers, and the thread that executes work requests. */
#include "verbs.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MAGIC = 0x534f4654, NO_ANSWER = -1, BURST = 64, DOZE_NS = 20000000, RETRY_NS = 100000 };

struct card *own_card;
pthread_mutex_t nic = PTHREAD_MUTEX_INITIALIZER;
struct queue_pair *all_pairs;

static int own_fd = -1;
static pthread_mutex_t bell = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bell_rings;
static int rung;
static struct peer peers[MAX_PEERS];
static int peer_count;
static pthread_mutex_t peer_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void ring_bell(void) {
  pthread_mutex_lock(&bell);
  rung = 1;
  pthread_cond_signal(&bell_rings);
  pthread_mutex_unlock(&bell);
}

void fail_pair(struct queue_pair *pair) {
  pair->v.state = IBV_QPS_ERR;
  atomic_store(&pair->shared->state, IBV_QPS_ERR);
}

/* --- peers
 * -------------------------------------------------------------------------------------------------------- */

union ibv_gid own_gid(int device) {
  union ibv_gid gid = {.raw = {0xfd, 'S', 'V', (uint8_t)device}};
  uint32_t words[3] = {own_card->pid, (uint32_t)own_fd, own_card->nonce};
  memcpy(gid.raw + 4, words, sizeof words);
  return gid;
}

static int open_peer(struct peer *peer, uint32_t fd_there) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/fd/%u", peer->pid, fd_there);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0)
    return -1;
  peer->card = mmap(0, sizeof *peer->card, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (peer->card == MAP_FAILED || peer->card->magic != MAGIC || peer->card->nonce != peer->nonce)
    return -1;
  peer->pidfd = syscall(SYS_pidfd_open, peer->pid, 0);
  return peer->pidfd < 0 ? -1 : 0;
}

struct peer *find_peer(const union ibv_gid *gid) {
  uint32_t words[3];
  struct peer *found = 0;
  memcpy(words, gid->raw + 4, sizeof words);
  pthread_mutex_lock(&peer_lock);
  for (int i = 0; i < peer_count && !found; i++)
    if (peers[i].pid == words[0] && peers[i].nonce == words[2])
      found = &peers[i];
  if (!found && peer_count < MAX_PEERS && gid->raw[1] == 'S') {
    struct peer peer = {.pid = words[0], .nonce = words[2], .pidfd = -1, .card = own_card};
    if (peer.pid == own_card->pid || open_peer(&peer, words[1]) == 0) {
      found = &peers[peer_count++];
      *found = peer;
    }
  }
  pthread_mutex_unlock(&peer_lock);
  return found;
}

static int is_gone(const struct peer *peer) {
  struct pollfd f = {peer->pidfd, POLLIN, 0};
  return peer->pidfd >= 0 && poll(&f, 1, 0) > 0;
}

/* --- work requests
 * ------------------------------------------------------------------------------------------------ */

static int allowed(struct card *card, uint32_t key, uint64_t address, uint64_t length, uint32_t access) {
  struct card_region *region = &card->regions[key & (MAX_REGIONS - 1)];
  if (!key || atomic_load(&region->key) != key || (region->access & access) != access)
    return 0;
  return address >= region->address && length <= region->length &&
         address - region->address <= region->length - length;
}

static int move_here(struct request *r, int read) {
  char *remote = (char *)(uintptr_t)r->remote;
  for (int i = 0; i < r->pieces; i++) {
    char *local = (char *)(uintptr_t)r->piece[i].addr;
    if (read)
      memmove(local, remote, r->piece[i].length);
    else
      memmove(remote, local, r->piece[i].length);
    remote += r->piece[i].length;
  }
  return IBV_WC_SUCCESS;
}

static int move_between(uint32_t pid, struct request *r, int read) {
  struct iovec local[MAX_SGE];
  uint64_t done = 0;
  while (done < r->length) {
    uint64_t skip = done;
    int count = 0;
    for (int i = 0; i < r->pieces; i++) {
      uint64_t length = r->piece[i].length;
      if (skip >= length) {
        skip -= length;
        continue;
      }
      local[count].iov_base = (char *)(uintptr_t)r->piece[i].addr + skip;
      local[count++].iov_len = length - skip;
      skip = 0;
    }
    struct iovec remote = {(char *)(uintptr_t)r->remote + done, r->length - done};
    ssize_t moved = read ? process_vm_readv(pid, local, count, &remote, 1, 0)
                         : process_vm_writev(pid, local, count, &remote, 1, 0);
    if (moved <= 0)
      return moved < 0 && errno == ESRCH ? IBV_WC_RETRY_EXC_ERR : IBV_WC_REM_ACCESS_ERR;
    done += moved;
  }
  return IBV_WC_SUCCESS;
}

/* An ibv_wc_status, or NO_ANSWER. */
static int execute(struct queue_pair *pair, struct request *r) {
  struct peer *peer = pair->peer;
  if (!peer || is_gone(peer))
    return NO_ANSWER;
  struct card_pair *there = &peer->card->pairs[pair->peer_slot];
  uint32_t state = atomic_load(&there->state);
  if (atomic_load(&there->number) != pair->shared->peer_number ||
      (state != IBV_QPS_RTR && state != IBV_QPS_RTS))
    return NO_ANSWER;
  int read = r->opcode == IBV_WR_RDMA_READ;
  if (!read && r->opcode != IBV_WR_RDMA_WRITE)
    return IBV_WC_LOC_QP_OP_ERR;
  for (int i = 0; i < r->pieces && !(r->flags & IBV_SEND_INLINE); i++)
    if (r->piece[i].length && !allowed(own_card, r->piece[i].lkey, r->piece[i].addr, r->piece[i].length,
                                       read ? IBV_ACCESS_LOCAL_WRITE : 0))
      return IBV_WC_LOC_PROT_ERR;
  if (r->length > (uint64_t)knobs[MAX_MSG_SZ])
    return IBV_WC_LOC_LEN_ERR;
  int status = (int)atomic_exchange(&knobs[FAIL_NEXT], 0);
  uint32_t access = read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
  if (!status && r->length) {
    if (!allowed(peer->card, r->key, r->remote, r->length, access))
      status = IBV_WC_REM_ACCESS_ERR;
    else
      status = peer->card == own_card ? move_here(r, read) : move_between(peer->pid, r, read);
  }
  if (status == IBV_WC_REM_ACCESS_ERR) { /* the responder's pair dies too */
    atomic_store(&there->event, 1u + IBV_EVENT_QP_ACCESS_ERR);
    atomic_store(&there->state, IBV_QPS_ERR);
  }
  if (!status) {
    knobs[read ? N_READ : N_WRITE]++;
    knobs[N_BYTES] += r->length;
  }
  return status;
}

static void complete(struct queue_pair *pair, struct request *r, int status) {
  struct completion_queue *queue = (struct completion_queue *)pair->v.send_cq;
  pthread_mutex_lock(&queue->lock);
  if (queue->head - queue->tail == queue->capacity) {
    fprintf(stderr, "softverbs: completion queue overrun\n");
    abort();
  }
  struct completion *c = &queue->ring[queue->head++ % queue->capacity];
  memset(c, 0, sizeof *c);
  c->wc.wr_id = r->id;
  c->wc.status = status;
  c->wc.opcode = r->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
  c->wc.byte_len = r->length;
  c->wc.qp_num = pair->v.qp_num;
  c->pair = pair;
  c->index = r->index + 1;
  pthread_mutex_unlock(&queue->lock);
}

/* The status to complete with, or NO_ANSWER while the peer may still answer. */
static int with_patience(struct queue_pair *pair, int status) {
  if (status != NO_ANSWER) {
    pair->silent_since = 0;
    return status;
  }
  uint64_t now = now_us(), patience = knobs[RETRY_MS] ? (uint64_t)knobs[RETRY_MS] * 1000 : pair->patience_us;
  if (!pair->silent_since)
    pair->silent_since = now;
  if (now - pair->silent_since < patience)
    return NO_ANSWER;
  pair->silent_since = 0;
  return IBV_WC_RETRY_EXC_ERR;
}

static int exists(const struct queue_pair *pair) {
  for (const struct queue_pair *p = all_pairs; p; p = p->next)
    if (p == pair)
      return 1;
  return 0;
}

enum step { NOTHING, MOVED, WAITING, VANISHED };

/* One request of a pair; `nic` is held, save during a delay. */
static enum step step(struct queue_pair *pair) {
  pthread_mutex_lock(&pair->lock);
  int have = pair->run < pair->posted;
  struct request *r = &pair->requests[pair->run % pair->cap.max_send_wr];
  pthread_mutex_unlock(&pair->lock);
  if (!have || pair->v.state == IBV_QPS_RESET)
    return NOTHING;
  if (knobs[DELAY_US] && pair->v.state != IBV_QPS_ERR) {
    pthread_mutex_unlock(&nic);
    usleep(knobs[DELAY_US]);
    pthread_mutex_lock(&nic);
    if (!exists(pair))
      return VANISHED;
  }
  int status = IBV_WC_WR_FLUSH_ERR;
  if (atomic_load(&pair->shared->state) != IBV_QPS_ERR) {
    status = with_patience(pair, execute(pair, r));
    if (status == NO_ANSWER)
      return WAITING;
  }
  if (status)
    fail_pair(pair);
  if (status || (r->flags & IBV_SEND_SIGNALED) || pair->signal_all)
    complete(pair, r, status);
  pthread_mutex_lock(&pair->lock);
  pair->run++;
  pthread_mutex_unlock(&pair->lock);
  return MOVED;
}

/* A peer's bad request has killed our side of the pair. */
static void notice_event(struct queue_pair *pair) {
  uint32_t event = atomic_exchange(&pair->shared->event, 0);
  if (event) {
    fail_pair(pair);
    push_event(pair->v.context, event - 1, pair, 0);
  }
}

static void wait_for_bell(long nanoseconds) {
  struct timespec t;
  pthread_mutex_lock(&bell);
  if (!rung) {
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_nsec += nanoseconds;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&bell_rings, &bell, &t);
  }
  rung = 0;
  pthread_mutex_unlock(&bell);
}

static void *card_main(void *unused) {
  (void)unused;
  prctl(PR_SET_NAME, "softverbs");
  for (;;) {
    int moved = 0, waiting = 0;
    enum step last = NOTHING;
    pthread_mutex_lock(&nic);
    for (struct queue_pair *pair = all_pairs; pair && !knobs[HANG] && last != VANISHED; pair = pair->next) {
      notice_event(pair);
      last = MOVED;
      for (int burst = 0; burst < BURST && last == MOVED; burst++) {
        last = step(pair);
        moved |= last == MOVED || last == VANISHED;
        waiting |= last == WAITING;
      }
      if (last == VANISHED)
        break; /* its `next` is gone */
    }
    pthread_mutex_unlock(&nic);
    if (!moved)
      wait_for_bell(waiting ? RETRY_NS : DOZE_NS);
  }
  return 0;
}

void start_card(void) {
  pthread_condattr_t attributes;
  pthread_t thread;
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* Yama: peers may reach our memory */
  own_fd = memfd_create("softverbs-card", MFD_CLOEXEC);
  if (own_fd < 0 || ftruncate(own_fd, sizeof *own_card)) {
    perror("softverbs: memfd");
    abort();
  }
  own_card = mmap(0, sizeof *own_card, PROT_READ | PROT_WRITE, MAP_SHARED, own_fd, 0);
  if (own_card == MAP_FAILED) {
    perror("softverbs: mmap");
    abort();
  }
  own_card->pid = getpid();
  own_card->nonce = (uint32_t)(now_us() * 2654435761u) ^ own_card->pid;
  own_card->magic = MAGIC;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&bell_rings, &attributes);
  pthread_create(&thread, 0, card_main, 0);
  pthread_detach(thread);
}
