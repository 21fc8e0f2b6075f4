// An NVTX tool in miniature: writes "thread outer/inner" to $LISTENER_LOG whenever a range opens.
#define NVTX_NO_IMPL
#include <nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static FILE* log_file;
static _Thread_local const char* open_ranges[64];
static _Thread_local int depth;

static nvtxDomainHandle_t domain_create(const char* name) { return (nvtxDomainHandle_t)strdup(name); }

static nvtxStringHandle_t register_string(nvtxDomainHandle_t domain, const char* name) {
  (void)domain;
  return (nvtxStringHandle_t)strdup(name);
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  char line[1024];
  int length = snprintf(line, sizeof line, "%ld %s:", (long)syscall(SYS_gettid), (const char*)domain);
  open_ranges[depth++] = (const char*)attributes->message.registered;
  for (int i = 0; i < depth; ++i)
    length += snprintf(line + length, sizeof line - length, "%s%s", i ? "/" : "", open_ranges[i]);
  fprintf(log_file, "%s\n", line);
  return depth - 1;
}

static int pop(nvtxDomainHandle_t domain) {
  (void)domain;
  if (depth == 0) abort();
  return --depth;
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const NvtxExportTableCallbacks* callbacks = get_table(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable table;
  unsigned size;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  log_file = fopen(getenv("LISTENER_LOG"), "w");
  *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)domain_create;
  *table[NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string;
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
  *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
  return log_file != NULL;
}
