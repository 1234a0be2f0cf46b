// report.cpp - messages: "cuda emulator: KERNEL, block, thread, FILE:LINE: what". Mistakes that the engine, a sanitizer or the
// processor finds are all reported here. Always compiled without instrumentation.
#include "engine.h"
#include "runtime.h"
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <dlfcn.h>
#include <execinfo.h>
#include <ucontext.h>
#include <unistd.h>

namespace emulator {
// The first thread to report ends the program; others stop here: one mistake, one message.
static void stop_others(void) {
    static std::atomic<bool> taken;
    static __thread bool mine;
    if (!mine && taken.exchange(true)) for (;;) pause();
    mine = true;
}
void print_message(const Thread* t, const char* place, const char* what) {
    stop_others();
    char where[128] = "";
    if (t) snprintf(where, sizeof where, ", block (%u,%u,%u), thread (%u,%u,%u)", t->block_idx.x, t->block_idx.y, t->block_idx.z,
                    t->thread_idx.x, t->thread_idx.y, t->thread_idx.z);
    fflush(stdout);
    fprintf(stderr, "cuda emulator: %s%s, %s: %s\n", t ? t->kernel : "host code", where, place, what);
}
void fail(const Thread* t, Site site, const char* format, ...) {
    FORMATTED(what, 1024, format);
    char place[512];
    snprintf(place, sizeof place, "%s:%d", site.file, site.line);
    print_message(t, place, what);
    _exit(1);
}
// The file that the kernels and this are linked into, and where it begins: the program, or a shared library that it opened.
static Dl_info find_kernels(void) {
    Dl_info found = {};
    dladdr((void*)print_message, &found);
    return found;
}
static const Dl_info kernels = find_kernels();
// The source line of an instruction: the innermost one outside the emulator, because emulator code is inlined into kernels.
// It may run in a signal handler, so addr2line is started without popen and nothing is allocated.
Place source_place(const void* pc) {
    stop_others();
    Place place = {"(unknown line)"};
    char program[32], address[32], lines[4096];
    snprintf(program, sizeof program, "/proc/%d/exe", (int)getpid()); // its name may be relative to another folder
    const char* file = strstr(kernels.dli_fname, ".so") ? kernels.dli_fname : program;
    size_t offset = (size_t)((const char*)pc - 1 - (const char*)kernels.dli_fbase); // a return address is just after its call
    snprintf(address, sizeof address, "0x%zx", offset);
    int ends[2];
    if (pipe(ends)) return place;
    if (_Fork() == 0) {
        dup2(ends[1], STDOUT_FILENO);
        execlp("addr2line", "addr2line", "-i", "-e", file, address, (char*)nullptr);
        _exit(1);
    }
    close(ends[1]);
    size_t length = 0;
    for (ssize_t n; length < sizeof lines - 1 && (n = read(ends[0], lines + length, sizeof lines - 1 - length)) > 0;)
        length += (size_t)n;
    lines[length] = 0;
    char directory[256];
    size_t prefix = getcwd(directory, sizeof directory) ? strlen(directory) : 0;
    for (char *rest = lines, *line; (line = strsep(&rest, "\n")) && *line && *line != '?';) {
        line[strcspn(line, " ")] = 0;
        if (prefix && !strncmp(line, directory, prefix) && line[prefix] == '/') line += prefix + 1;
        snprintf(place.text, sizeof place.text, "%s", line);
        if (!strstr(line, "emulator/device_functions.h") && !strstr(line, "emulator/matrix.h") &&
            !strstr(line, "emulator/hopper.h")) break;
    }
    return place;
}

// --- signals: a fault in a kernel, in a stream's other work, or of host code that touched device memory becomes a message; any
// other goes to the previous handler ---
static struct sigaction before[NSIG];
// The innermost line of the backtrace that is not in a library.
static Place calling_place(const char* pc) {
    void* frames[64];
    int count = backtrace(frames, 64), i = 0;
    while (i < count && frames[i] != pc) i++; // skips this handler's own frames
    for (Place place; i < count; i++) {
        place = source_place((const char*)frames[i] + (frames[i] == pc));
        if (*place.text != '(') return place;
    }
    return {"(unknown line)"};
}
static void on_signal(int number, siginfo_t* info, void* context) {
    const Fiber* f = static_cast<const Fiber*>(self);
#if defined(__x86_64__)
    const char* pc = (const char*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#else
    const char* pc = (const char*)((ucontext_t*)context)->uc_mcontext.pc;
#endif
    char what[300], place[160] = "";
    if (number == SIGSEGV) describe(info->si_addr, place, sizeof place);
    snprintf(what, sizeof what, *place ? "%s at %p, %s" : "%s", strsignal(number), info->si_addr, place);
    if (f) {
        bool below_stack = number == SIGSEGV && (size_t)(f->stack - (const char*)info->si_addr) < PAGE;
        print_message(f, source_place(pc + 1).text, below_stack ? "its stack overflows" : what);
    } else if (running) {
        explain(running, "%s", what);
    } else if (*place) {
        snprintf(what, sizeof what, "host code touched device memory at %p, %s", info->si_addr, place);
        print_message(nullptr, calling_place(pc).text, what);
    } else {
        sigaction(number, &before[number], nullptr); // and it happens again
        return;
    }
    _exit(1);
}
static int catch_signals(void) {
    void* frame;
    backtrace(&frame, 1); // its first call loads a library, which a signal handler should not do
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_ONSTACK | SA_SIGINFO; // on a separate stack (engine.cpp), because the fiber's may have overflowed
    for (int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaction(s, &action, &before[s]);
    return 0;
}
static int signals_caught = catch_signals();
} // namespace emulator

// --- called by the sanitizers when they report: adds one line of ours to theirs ---
using namespace emulator;
extern "C" {
void __ubsan_get_current_report_data(const char** kind, const char** message, const char** file, unsigned* line,
                                     unsigned* column, char** address);
void __ubsan_on_report(void) {
    const char *kind, *message, *file;
    char* address;
    unsigned line, column;
    __ubsan_get_current_report_data(&kind, &message, &file, &line, &column, &address);
    char place[512];
    snprintf(place, sizeof place, "%s:%u", file, line);
    print_message(self, place, message);
}
const char* __ubsan_default_options(void) { return "print_stacktrace=1:halt_on_error=1"; }
#ifdef EMULATOR_ASAN
void* __asan_get_report_pc(void);
const char* __asan_get_report_description(void);
void __asan_on_error(void) { print_message(self, source_place(__asan_get_report_pc()).text, __asan_get_report_description()); }
#endif
#ifdef EMULATOR_TSAN
int __tsan_get_report_mop(void* report, unsigned long index, int* tid, void** address, int* size, int* write, int* atomic,
                          void** trace, unsigned long trace_size);
const char* __tsan_default_options(void) { return "halt_on_error=1:exitcode=1"; }
void __tsan_on_report(void* report) {
    Place places[2];
    const char* kinds[2];
    for (unsigned long i = 0; i < 2; i++) {
        void *address, *trace[8] = {};
        int tid, size, write, atomic, frame = 0;
        __tsan_get_report_mop(report, i, &tid, &address, &size, &write, &atomic, trace, 8);
        do places[i] = source_place(trace[frame++]); // the first that is not a library's, such as memset's
        while (*places[i].text == '(' && frame < 8 && trace[frame]);
        kinds[i] = write ? "write" : "read";
    }
    char what[600];
    snprintf(what, sizeof what, "data race: this %s and a %s at %s by another thread have nothing between to order them",
             kinds[0], kinds[1], places[1].text);
    print_message(self, places[0].text, what);
}
#endif
}
