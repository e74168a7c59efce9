/* Stands for the little that is called of libpci, HSA and rocm-smi. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define STUB(name, ...) name(__VA_ARGS__)

#ifdef WITH_UNEXPECTED
/* reached from the generated stubs: something called what has no stand-in */
__attribute__((visibility("hidden"), noreturn)) void stub_unexpected(const char *name) {
  fprintf(stderr, "mori stubs: unexpected call of %s\n", name);
  fflush(stderr);
  abort();
}
#endif

#ifdef LIB_PCI
static uint64_t pci_room[8192]; /* a zeroed struct pci_access: no devices */
void *STUB(pci_alloc, void) {
  return pci_room;
}
void STUB(pci_init, void *a) {
  (void)a;
}
void STUB(pci_scan_bus, void *a) {
  (void)a;
}
void STUB(pci_cleanup, void *a) {
  (void)a;
}
int STUB(pci_fill_info, void *d, int f) {
  (void)d;
  (void)f;
  return 0;
}
uint8_t STUB(pci_read_byte, void *d, int p) {
  (void)d;
  (void)p;
  return 0;
}
#endif

#ifdef LIB_HSA
enum { HSA_ERROR = 0x1000 };
int STUB(hsa_init, void) {
  return HSA_ERROR;
}
int STUB(hsa_shut_down, void) {
  return 0;
}
int STUB(hsa_amd_portable_export_dmabuf, const void *p, size_t n, int *fd, uint64_t *off) {
  (void)p;
  (void)n;
  *fd = -1;
  *off = 0;
  return HSA_ERROR;
}
#endif

#ifdef LIB_ROCM_SMI
/* The engine's topology code dlopens librocm_smi64 and exit(-1)s the process
 * when there is none or it counts no GPU, so there is one made-up GPU here. */
int rsmi_init(uint64_t f) {
  (void)f;
  return 0;
}
int rsmi_shut_down(void) {
  return 0;
}
int rsmi_num_monitor_devices(uint32_t *n) {
  *n = 1;
  return 0;
}
int rsmi_dev_pci_id_get(uint32_t i, uint64_t *bdf) {
  *bdf = 0x0100 + i;
  return 0;
}
int rsmi_is_P2P_accessible(uint32_t a, uint32_t b, _Bool *y) {
  (void)a;
  (void)b;
  *y = 0;
  return 0;
}
int rsmi_topo_get_link_type(uint32_t a, uint32_t b, uint64_t *h, int *t) {
  (void)a;
  (void)b;
  *h = 1;
  *t = 0;
  return 0;
}
int rsmi_topo_get_link_weight(uint32_t a, uint32_t b, uint64_t *w) {
  (void)a;
  (void)b;
  *w = 1;
  return 0;
}
int rsmi_status_string(int s, const char **t) {
  (void)s;
  *t = "stub";
  return 0;
}
#endif
