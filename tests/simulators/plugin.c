/* A tuner and a profiler as NCCL loads them, for the tests of the simulator: data symbols with the layout of v5 and v6
 * (NVIDIA/nccl, src/include/plugin). The tuner sets to 0 the cost of the pair that the variables name, and both write
 * their calls into the file PLUGIN_LOG. The compiler defines PLUGIN_VERSION, which selects the symbols. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*logger)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

__attribute__((format(printf, 1, 2))) static void tell(const char* format, ...) {
  FILE* file = fopen(getenv("PLUGIN_LOG"), "a");
  if (file) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
    fclose(file);
  }
}

static int number(const char* name, int otherwise) {
  return getenv(name) ? atoi(getenv(name)) : otherwise;
}

struct domains {
  int count, least, most;
};

static int tuner_init(void** context, uint64_t id, size_t ranks, size_t nodes, logger log, struct domains* domains,
                      double* constants) {
  *context = malloc(8);
  log(3, ~0ul, "plugin.c", __LINE__, "the plug-in logs");
  tell("tuner init ranks=%zu nodes=%zu most=%d %s\n", ranks, nodes, domains->most,
       id != 0 && constants[0] > 0 ? "ok" : "wrong");
  return 0;
}

static int tuner_get(void* context, int function, size_t bytes, int operations, float** table, int algorithms,
                     int protocols, int registered, int* channels) {
  float* cost = (float*)table;
  int algorithm = number("PLUGIN_ALGO", 0), protocol = number("PLUGIN_PROTO", 0);
  tell("tuner get function=%d bytes=%zu operations=%d %s\n", function, bytes, operations,
       algorithms == 7 && protocols == 3 && !registered && context ? "ok" : "wrong");
  if (number("PLUGIN_FORCE", 0) || cost[algorithm * protocols + protocol] >= 0) {
    cost[algorithm * protocols + protocol] = 0;
  }
  *channels = 3;
  return number("PLUGIN_RESULT", 0);
}

#if PLUGIN_VERSION == 6
static int tuner_chunk(void* context, int function, size_t bytes, int algorithm, int protocol, int channels,
                       size_t* chunk) {
  (void)context, (void)function, (void)bytes;
  tell("tuner chunk algorithm=%d protocol=%d channels=%d\n", algorithm, protocol, channels);
  *chunk = 1 << 16;
  return 0;
}
#endif

static int finalize(void* context) {
  tell("finalize\n");
  free(context);
  return 0;
}

struct tuner {
  const char* name;
  int (*init)(void**, uint64_t, size_t, size_t, logger, struct domains*, double*);
  int (*get)(void*, int, size_t, int, float**, int, int, int, int*);
  int (*finalize)(void*);
  int (*chunk)(void*, int, size_t, int, int, int, size_t*);
};

struct event {
  uint64_t type;
  void* parent;
  int rank;
  struct {
    uint64_t number;
    const char* function;
    const void* send;
    void* recv;
    size_t count;
    int root;
    const char* datatype;
    uint8_t channels, warps;
    const char *algorithm, *protocol;
    void* group;
  } coll;
};

static int profiler_init(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank,
                         logger log) {
  (void)id, (void)log;
  *context = malloc(8);
  *mask = 2;
  tell("profiler init nodes=%d ranks=%d rank=%d %s\n", nodes, ranks, rank, name && *name ? "ok" : "wrong");
  return 0;
}

static int profiler_start(void* context, void** handle, struct event* event) {
  *handle = context;
  tell("profiler start type=%d rank=%d number=%d func=%s type=%s count=%zu root=%d %s %s\n", (int)event->type,
       event->rank, (int)event->coll.number, event->coll.function, event->coll.datatype, event->coll.count,
       event->coll.root, event->coll.algorithm, event->coll.protocol);
  return 0;
}

static int profiler_stop(void* handle) {
  tell("profiler stop %d\n", handle != 0);
  return 0;
}

static int profiler_record(void* handle, int state, void* arguments) {
  (void)handle, (void)state, (void)arguments;
  return 0;
}

struct profiler {
  const char* name;
  int (*init)(void**, uint64_t, int*, const char*, int, int, int, logger);
  int (*start)(void*, void**, struct event*);
  int (*stop)(void*);
  int (*record)(void*, int, void*);
  int (*finalize)(void*);
};

#if PLUGIN_VERSION == 6
const struct tuner ncclTunerPlugin_v6 = {"test", tuner_init, tuner_get, finalize, tuner_chunk};
const struct profiler ncclProfiler_v6 = {"test",        profiler_init,   profiler_start,
                                         profiler_stop, profiler_record, finalize};
#else
const struct tuner ncclTunerPlugin_v5 = {"test", tuner_init, tuner_get, finalize, 0};
const struct profiler ncclProfiler_v5 = {"test",        profiler_init,   profiler_start,
                                         profiler_stop, profiler_record, finalize};
#endif
