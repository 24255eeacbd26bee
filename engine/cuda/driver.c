//go:build linux && cgo

#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// TRY returns from the function unless a call of the driver went well.
#define TRY(field, ...) \
	do { \
		CUresult code_ = d->field(__VA_ARGS__); \
		if (code_ != CUDA_SUCCESS) \
			return (tf_result){#field, code_}; \
	} while (0)

static const tf_result well = {"", CUDA_SUCCESS};

const tf_driver *tf_open(const char *library, char *why, size_t n) {
	// It is never closed: a driver leaves threads and handlers behind.
	void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	if (handle == NULL) {
		snprintf(why, n, "%s", dlerror());
		return NULL;
	}
	tf_driver *d = calloc(1, sizeof *d);
	if (d == NULL) {
		snprintf(why, n, "no memory");
		return NULL;
	}
#define X(field, symbol, ...) \
	if ((*(void **)&d->field = dlsym(handle, symbol)) == NULL) { \
		snprintf(why, n, "%s has no %s; the driver is older than R470, or not NVIDIA's", library, symbol); \
		free(d); \
		return NULL; \
	}
	TF_SYMBOLS(X)
#undef X
	return d;
}

void tf_text(const tf_driver *d, CUresult code, char *text, size_t n) {
	const char *name = NULL, *says = NULL;
	if (d->GetErrorName(code, &name) != CUDA_SUCCESS || name == NULL)
		name = "unknown error";
	if (d->GetErrorString(code, &says) != CUDA_SUCCESS || says == NULL)
		says = "no description";
	snprintf(text, n, "%s (%d): %s", name, code, says);
}

tf_result tf_count(const tf_driver *d, int *count, int *version) {
	TRY(Init, 0);
	TRY(DriverGetVersion, version);
	TRY(DeviceGetCount, count);
	return well;
}

tf_result tf_describe(const tf_driver *d, int ordinal, char *name, int n, size_t *memory, int *major, int *minor) {
	CUdevice device;
	TRY(DeviceGet, &device, ordinal);
	TRY(DeviceGetName, name, n, device);
	TRY(DeviceTotalMem, memory, device);
	TRY(DeviceGetAttribute, major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
	TRY(DeviceGetAttribute, minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
	return well;
}

tf_result tf_start(tf_device *v) {
	const tf_driver *d = v->driver;
	// Best effort: where others have the context already, its flags stay theirs.
	(void)d->DevicePrimaryCtxSetFlags(v->ordinal, CU_CTX_SCHED_BLOCKING_SYNC);
	TRY(DevicePrimaryCtxRetain, &v->context, v->ordinal);
	TRY(CtxSetCurrent, v->context);
	TRY(StreamCreate, &v->h2d, CU_STREAM_NON_BLOCKING);
	TRY(StreamCreate, &v->compute, CU_STREAM_NON_BLOCKING);
	TRY(StreamCreate, &v->d2h, CU_STREAM_NON_BLOCKING);
	return well;
}

tf_result tf_load(tf_device *v, const char *ptx, char *log, size_t n) {
	const tf_driver *d = v->driver;
	TRY(CtxSetCurrent, v->context);
	int options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
	void *values[] = {log, (void *)(uintptr_t)n};
	TRY(ModuleLoadDataEx, &v->module, ptx, 2, options, values);
	return well;
}

tf_result tf_function(tf_device *v, const char *entry, CUfunction *function) {
	const tf_driver *d = v->driver;
	TRY(CtxSetCurrent, v->context);
	TRY(ModuleGetFunction, function, v->module, entry);
	return well;
}

void tf_stop(tf_device *v) {
	const tf_driver *d = v->driver;
	if (v->context == NULL)
		return;
	(void)d->CtxSetCurrent(v->context);
	CUstream *streams[] = {&v->h2d, &v->compute, &v->d2h};
	for (int i = 0; i < 3; i++) {
		if (*streams[i] != NULL)
			(void)d->StreamDestroy(*streams[i]);
		*streams[i] = NULL;
	}
	if (v->module != NULL)
		(void)d->ModuleUnload(v->module);
	v->module = NULL;
	(void)d->CtxSetCurrent(NULL);
	(void)d->DevicePrimaryCtxRelease(v->ordinal);
	v->context = NULL;
}

void tf_reset(tf_device *v) {
	const tf_driver *d = v->driver;
	if (v->context == NULL)
		return;
	// The reset destroys what is in the context, whatever its state; the handles must
	// not be used again. The reference taken by the retain is given back besides.
	(void)d->DevicePrimaryCtxReset(v->ordinal);
	(void)d->CtxSetCurrent(NULL);
	(void)d->DevicePrimaryCtxRelease(v->ordinal);
	v->context = NULL;
	v->h2d = v->compute = v->d2h = NULL;
	v->module = NULL;
}

tf_result tf_lane_open(tf_device *v, tf_lane *l) {
	const tf_driver *d = v->driver;
	memset(l, 0, sizeof *l);
	TRY(CtxSetCurrent, v->context);
	for (int timed = 0; timed < 2; timed++)
		for (int i = 0; i < TF_EVENTS; i++)
			TRY(EventCreate, &l->events[timed][i], CU_EVENT_BLOCKING_SYNC | (timed ? 0 : CU_EVENT_DISABLE_TIMING));
	return well;
}

tf_result tf_lane_grow(tf_device *v, tf_lane *l, size_t bytes) {
	const tf_driver *d = v->driver;
	if (bytes <= l->bytes)
		return well;
	TRY(CtxSetCurrent, v->context);
	if (l->bytes > 0) {
		l->bytes = 0;
		TRY(MemFree, l->memory);
	}
	TRY(MemAlloc, &l->memory, bytes);
	l->bytes = bytes;
	return well;
}

void tf_lane_close(tf_device *v, tf_lane *l) {
	const tf_driver *d = v->driver;
	(void)d->CtxSetCurrent(v->context);
	for (int timed = 0; timed < 2; timed++)
		for (int i = 0; i < TF_EVENTS; i++)
			if (l->events[timed][i] != NULL)
				(void)d->EventDestroy(l->events[timed][i]);
	if (l->bytes > 0)
		(void)d->MemFree(l->memory);
	memset(l, 0, sizeof *l);
}

static tf_result enqueue(tf_device *v, tf_lane *l, const tf_block *b, const tf_launch *launches, unsigned count) {
	const tf_driver *d = v->driver;
	CUevent *events = l->events[l->timed = b->timed];
	if (b->timed)
		TRY(EventRecord, events[TF_IN_BEGIN], v->h2d);
	for (const tf_input *in = b->in; in < b->in + TF_INPUTS; in++)
		if (in->bytes > 0)
			TRY(MemcpyHtoDAsync, l->memory + in->at, in->from, in->bytes, v->h2d);
	TRY(EventRecord, events[TF_IN_END], v->h2d);

	TRY(StreamWaitEvent, v->compute, events[TF_IN_END], 0);
	if (b->timed)
		TRY(EventRecord, events[TF_RUN_BEGIN], v->compute);
	for (const tf_launch *k = launches; k < launches + count; k++) {
		void *params[TF_PARAMS];
		for (unsigned p = 0; p < k->params; p++)
			params[p] = (void *)(k->bytes + k->offsets[p]);
		TRY(LaunchKernel, k->function, k->grid[0], k->grid[1], k->grid[2], k->block[0], k->block[1], k->block[2], 0, v->compute, params, NULL);
	}
	TRY(EventRecord, events[TF_RUN_END], v->compute);

	TRY(StreamWaitEvent, v->d2h, events[TF_RUN_END], 0);
	if (b->timed)
		TRY(EventRecord, events[TF_OUT_BEGIN], v->d2h);
	if (b->out_bytes > 0)
		TRY(MemcpyDtoHAsync, b->out, l->memory + b->out_at, b->out_bytes, v->d2h);
	TRY(EventRecord, events[TF_OUT_END], v->d2h);
	return well;
}

tf_result tf_submit(tf_device *v, tf_lane *l, const tf_block *b, const tf_launch *launches, unsigned count) {
	const tf_driver *d = v->driver;
	TRY(CtxSetCurrent, v->context);
	tf_result r = enqueue(v, l, b, launches, count);
	if (r.code != CUDA_SUCCESS) { // what was enqueued before may still run
		TRY(StreamSynchronize, v->h2d);
		TRY(StreamSynchronize, v->compute);
		TRY(StreamSynchronize, v->d2h);
	}
	return r;
}

tf_result tf_wait(tf_device *v, tf_lane *l, int event) {
	const tf_driver *d = v->driver;
	TRY(CtxSetCurrent, v->context);
	TRY(EventSynchronize, l->events[l->timed][event]);
	return well;
}

tf_result tf_times(tf_device *v, tf_lane *l, float millis[3]) {
	const tf_driver *d = v->driver;
	TRY(CtxSetCurrent, v->context);
	for (int i = 0; i < 3; i++)
		TRY(EventElapsedTime, &millis[i], l->events[1][2 * i], l->events[1][2 * i + 1]);
	return well;
}

tf_result tf_alloc(tf_device *v, CUdeviceptr *at, size_t bytes) {
	const tf_driver *d = v->driver;
	TRY(CtxSetCurrent, v->context);
	TRY(MemAlloc, at, bytes);
	return well;
}

tf_result tf_free(tf_device *v, CUdeviceptr at) {
	const tf_driver *d = v->driver;
	TRY(CtxSetCurrent, v->context);
	TRY(MemFree, at);
	return well;
}

tf_result tf_upload(tf_device *v, CUdeviceptr at, const void *from, size_t bytes) {
	const tf_driver *d = v->driver;
	TRY(CtxSetCurrent, v->context);
	TRY(MemcpyHtoDAsync, at, from, bytes, v->h2d);
	TRY(StreamSynchronize, v->h2d);
	return well;
}

tf_result tf_memory(tf_device *v, size_t *left, size_t *total) {
	const tf_driver *d = v->driver;
	TRY(CtxSetCurrent, v->context);
	TRY(MemGetInfo, left, total);
	return well;
}

tf_result tf_register(tf_device *v, void *memory, size_t bytes) {
	const tf_driver *d = v->driver;
	if (v->context == NULL)
		return (tf_result){"CtxSetCurrent", CUDA_ERROR_NOT_INITIALIZED};
	TRY(CtxSetCurrent, v->context);
	TRY(MemHostRegister, memory, bytes, CU_MEMHOSTREGISTER_PORTABLE);
	return well;
}

tf_result tf_unregister(tf_device *v, void *memory) {
	const tf_driver *d = v->driver;
	TRY(CtxSetCurrent, v->context);
	TRY(MemHostUnregister, memory);
	return well;
}

void *tf_map(size_t bytes) {
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return NULL;
#ifdef __SANITIZE_ADDRESS__
	// A heap's memory may have been here before, of which the sanitizer still knows.
	__asan_unpoison_memory_region(memory, bytes);
#endif
	(void)madvise(memory, bytes, MADV_DONTFORK);
	(void)madvise(memory, bytes, MADV_HUGEPAGE); // best effort: fewer pages to lock
	return memory;
}

int tf_unmap(void *memory, size_t bytes) { return munmap(memory, bytes); }

// Go needs every handler to run on the signal stack (SA_ONSTACK).
static struct sigaction kept[NSIG];

void tf_signals_keep(void) {
	for (int s = 1; s < NSIG; s++)
		if (sigaction(s, NULL, &kept[s]) != 0)
			memset(&kept[s], 0, sizeof kept[s]);
}

int tf_signals_restore(void) {
	int restored = 0;
	for (int s = 1; s < NSIG; s++) {
		struct sigaction now;
		if (sigaction(s, NULL, &now) != 0 || now.sa_sigaction == kept[s].sa_sigaction)
			continue;
		int theirs = now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN && (now.sa_flags & SA_ONSTACK) == 0;
		if (theirs && sigaction(s, &kept[s], NULL) == 0)
			restored++;
	}
	return restored;
}
