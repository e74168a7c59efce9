/* Devices, ports and asynchronous events; the knobs. */
#include "verbs.h"
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

_Atomic long knobs[KNOBS] = {[MAX_QP_WR] = 16384, [MAX_MSG_SZ] = 1L << 30, [NAP_US] = 50};

static const char *const knob_names[KNOBS] = {
    [DELAY_US] = "delay_us",   [HANG] = "hang",
    [FAIL_NEXT] = "fail_next", [POST_ERRNO] = "post_errno",
    [REG_ERRNO] = "reg_errno", [RETRY_MS] = "retry_ms",
    [MAX_QP_WR] = "max_qp_wr", [MAX_MSG_SZ] = "max_msg_sz",
    [PORT_DOWN] = "port_down", [NAP_US] = "nap_us",
    [N_WRITE] = "n_write",     [N_READ] = "n_read",
    [N_BYTES] = "n_bytes",     [N_QP] = "n_qp",
    [N_MR] = "n_mr",           [N_POST] = "n_post",
};

static struct ibv_device devices[MAX_DEVICES];
static int device_count = 1;
static struct context *contexts;
static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* SOFTVERBS_RETRY_MS=300 and so on. */
static void read_environment(void) {
  for (int k = 0; k < KNOBS; k++) {
    char name[64] = "SOFTVERBS_";
    size_t at = strlen(name);
    for (const char *c = knob_names[k]; *c; c++)
      name[at++] = toupper(*c);
    if (getenv(name))
      knobs[k] = atol(getenv(name));
  }
  const char *count = getenv("SOFTVERBS_DEVICES");
  if (count && atoi(count) >= 0 && atoi(count) <= MAX_DEVICES)
    device_count = atoi(count);
}

/* The engine looks for a PCI address in the real path of a device, and never ends where there is none:
 * `stubs.py` makes sysfs/0000:01:00.N beside this library. */
static void make_devices(void) {
  Dl_info info;
  char folder[160] = ".";
  if (dladdr((void *)ibv_get_device_list, &info)) {
    snprintf(folder, sizeof folder, "%s", info.dli_fname);
    char *slash = strrchr(folder, '/');
    if (slash)
      *slash = 0;
  }
  for (int i = 0; i < device_count; i++) {
    struct ibv_device *d = &devices[i];
    d->node_type = IBV_NODE_CA;
    d->transport_type = IBV_TRANSPORT_IB;
    snprintf(d->name, sizeof d->name, "soft_%d", i);
    snprintf(d->dev_name, sizeof d->dev_name, "uverbs%d", i);
    snprintf(d->dev_path, sizeof d->dev_path, "%s/sysfs/0000:01:00.%d", folder, i);
    memcpy(d->ibdev_path, d->dev_path, sizeof d->ibdev_path);
  }
}

static void start(void) {
  read_environment();
  start_card();
  make_devices();
}

void start_once(void) {
  pthread_once(&once, start);
}

/* --- devices
 * ------------------------------------------------------------------------------------------------------ */

static int request_notify(struct ibv_cq *queue, int solicited_only) {
  (void)queue, (void)solicited_only;
  return 0;
}

EXPORT struct ibv_device **ibv_get_device_list(int *count) {
  start_once();
  struct ibv_device **list = calloc(device_count + 1, sizeof *list);
  for (int i = 0; i < device_count; i++)
    list[i] = &devices[i];
  if (count)
    *count = device_count;
  return list;
}

EXPORT void ibv_free_device_list(struct ibv_device **list) {
  free(list);
}

EXPORT const char *ibv_get_device_name(struct ibv_device *device) {
  return device->name;
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device) {
  start_once();
  struct context *x = calloc(1, sizeof *x);
  x->device = device - devices;
  x->v.device = device;
  x->v.cmd_fd = -1;
  x->v.num_comp_vectors = 1;
  x->v.async_fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
  x->v.ops.poll_cq = poll_completions;
  x->v.ops.req_notify_cq = request_notify;
  x->v.ops.post_send = post_send;
  x->v.ops.post_recv = post_receive;
  pthread_mutex_init(&x->lock, 0);
  pthread_mutex_init(&x->v.mutex, 0);
  pthread_mutex_lock(&context_lock);
  x->next = contexts;
  contexts = x;
  pthread_mutex_unlock(&context_lock);
  return &x->v;
}

EXPORT int ibv_close_device(struct ibv_context *context) {
  struct context **at = &contexts;
  pthread_mutex_lock(&context_lock);
  while (&(*at)->v != context)
    at = &(*at)->next;
  struct context *x = *at;
  *at = x->next;
  pthread_mutex_unlock(&context_lock);
  close(x->v.async_fd);
  free(x);
  return 0;
}

EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *a) {
  memset(a, 0, sizeof *a);
  snprintf(a->fw_ver, sizeof a->fw_ver, "0.0");
  a->node_guid = 1 + ((struct context *)context)->device;
  a->vendor_id = 0x534f;
  a->vendor_part_id = 1;
  a->max_mr_size = ~0ull;
  a->page_size_cap = 4096;
  a->max_qp = a->max_cq = MAX_PAIRS;
  a->max_qp_wr = knobs[MAX_QP_WR];
  a->max_sge = MAX_SGE;
  a->max_cqe = 1 << 20;
  a->max_mr = MAX_REGIONS;
  a->max_pd = 1024;
  a->max_qp_rd_atom = a->max_qp_init_rd_atom = 16;
  a->phys_port_cnt = 1;
  return 0;
}

EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *compat) {
  struct ibv_port_attr *a = (struct ibv_port_attr *)compat;
  (void)context;
  if (port != 1)
    return EINVAL;
  a->state = knobs[PORT_DOWN] ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
  a->max_mtu = a->active_mtu = IBV_MTU_4096;
  a->gid_tbl_len = a->pkey_tbl_len = a->max_vl_num = 1;
  a->port_cap_flags = 0;
  a->max_msg_sz = knobs[MAX_MSG_SZ];
  a->lid = a->sm_lid = 0;
  a->active_width = 2;
  a->active_speed = 64;
  a->phys_state = 5;
  a->link_layer = IBV_LINK_LAYER_ETHERNET;
  a->flags = 0;
  return 0;
}

EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
  if (port != 1 || index)
    return -1;
  *gid = own_gid(((struct context *)context)->device);
  return 0;
}

EXPORT int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index,
                             struct ibv_gid_entry *entry, uint32_t flags, size_t size) {
  (void)flags, (void)size;
  if (port != 1 || index)
    return ENODATA;
  memset(entry, 0, sizeof *entry);
  entry->gid = own_gid(((struct context *)context)->device);
  entry->port_num = 1;
  entry->gid_type = IBV_GID_TYPE_ROCE_V2;
  return 0;
}

/* --- events
 * ------------------------------------------------------------------------------------------------------- */

void push_event(struct ibv_context *context, enum ibv_event_type type, struct queue_pair *pair, int port) {
  struct context *x = (struct context *)context;
  pthread_mutex_lock(&x->lock);
  if (x->head - x->tail < MAX_EVENTS) {
    struct ibv_async_event *e = &x->events[x->head++ % MAX_EVENTS];
    memset(e, 0, sizeof *e);
    e->event_type = type;
    if (pair)
      e->element.qp = &pair->v;
    else
      e->element.port_num = port;
    eventfd_write(x->v.async_fd, 1);
  }
  pthread_mutex_unlock(&x->lock);
}

EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
  struct context *x = (struct context *)context;
  eventfd_t count;
  if (eventfd_read(x->v.async_fd, &count))
    return -1;
  pthread_mutex_lock(&x->lock);
  *event = x->events[x->tail++ % MAX_EVENTS];
  pthread_mutex_unlock(&x->lock);
  return 0;
}

EXPORT void ibv_ack_async_event(struct ibv_async_event *event) {
  (void)event;
}

/* --- for tests
 * ---------------------------------------------------------------------------------------------------- */

static _Atomic long *find_knob(const char *name) {
  start_once();
  for (int k = 0; k < KNOBS; k++)
    if (!strcmp(knob_names[k], name))
      return &knobs[k];
  return 0;
}

EXPORT int softverbs_set(const char *name, long value) {
  _Atomic long *knob = find_knob(name);
  if (!knob)
    return -1;
  *knob = value;
  ring_bell();
  return 0;
}

EXPORT long softverbs_get(const char *name) {
  _Atomic long *knob = find_knob(name);
  return knob ? *knob : -1;
}

/* Raise an event: of every queue pair, which then fails, or of every device.  Returns how many had it. */
EXPORT int softverbs_event(int type) {
  int count = 0;
  start_once();
  if (type == IBV_EVENT_QP_FATAL) {
    pthread_mutex_lock(&nic);
    for (struct queue_pair *pair = all_pairs; pair; pair = pair->next, count++) {
      fail_pair(pair);
      push_event(pair->v.context, type, pair, 0);
    }
    pthread_mutex_unlock(&nic);
  } else {
    pthread_mutex_lock(&context_lock);
    for (struct context *x = contexts; x; x = x->next, count++)
      push_event(&x->v, type, 0, 1);
    pthread_mutex_unlock(&context_lock);
  }
  ring_bell();
  return count;
}
