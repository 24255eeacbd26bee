// The fake driver: what tests do to it, and what they read from it.

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "fake.h"

namespace fake {

State &s = *new State;

namespace {

constexpr size_t max_violations = 1000;

const auto loaded = std::chrono::steady_clock::now();

const int disturbed[] = {SIGINT, SIGTERM};
struct sigaction before[2];

// on_signal does what a handler that was installed without a thought for Go's does:
// it calls the one before it, on whatever stack it is.
void on_signal(int sig, siginfo_t *info, void *context) {
    const struct sigaction &old = before[sig == SIGTERM];
    if (old.sa_flags & SA_SIGINFO) {
        old.sa_sigaction(sig, info, context);
    } else if (old.sa_handler == SIG_DFL) {
        signal(sig, SIG_DFL);
        raise(sig);
    } else if (old.sa_handler != SIG_IGN) {
        old.sa_handler(sig);
    }
}

void restore_signals() {
    for (int i = 0; i < 2; i++) {
        struct sigaction now;
        if (sigaction(disturbed[i], nullptr, &now) == 0 && now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_signal)
            sigaction(disturbed[i], &before[i], nullptr);
    }
}

// words takes "key number" pairs from in; false when something else is there.
bool words(std::istringstream &in, const std::map<std::string, int64_t *> &known) {
    std::string key;
    while (in >> key) {
        auto it = known.find(key);
        if (it == known.end() || !(in >> *it->second)) return false;
    }
    return true;
}

bool command(const std::string &text) {
    std::istringstream in(text);
    std::string verb, name, rest;
    if (!(in >> verb)) return true;  // empty
    int64_t n = 0, m = 0;
    if (verb == "fail" || verb == "async") {
        Fault f{"", 0, verb == "async", 0, -1};
        if (f.async && !(in >> verb && verb == "fail")) return false;
        if (!(in >> f.name >> f.code) || !words(in, {{"after", &f.after}, {"times", &f.times}})) return false;
        s.set.faults.push_back(f);
    } else if (verb == "sticky") {
        int64_t device = -1;
        if (!(in >> n) || n == 0 || !words(in, {{"device", &device}})) return false;
        for (auto &[handle, ctx] : s.contexts)
            if (device < 0 || ctx->device == device) fail(ctx, int(n), true);
    } else if (verb == "delay") {
        if (!(in >> name >> n)) return false;
        s.set.delays[name] = n;
    } else if (verb == "late") {
        if (!(in >> n)) return false;
        s.set.delays["copies"] = n;
    } else if (verb == "hang") {
        if (!(in >> name)) return false;
        s.set.hangs[name] = true;
    } else if (verb == "unhang") {
        if (in >> name)
            s.set.hangs.erase(name);
        else
            s.set.hangs.clear();
    } else if (verb == "memory") {
        if (!(in >> n) || n < 0) return false;
        s.set.memory = n;
    } else if (verb == "devices") {
        if (!(in >> n) || n < 0 || n > max_devices) return false;
        s.set.devices = int(n);
    } else if (verb == "capability") {
        if (!(in >> n >> m)) return false;
        s.set.major = int(n), s.set.minor = int(m);
    } else if (verb == "driver") {
        if (!(in >> n)) return false;
        s.set.version = int(n);
    } else if (verb == "refuse-registration") {
        s.set.refuse = NOT_SUPPORTED;
        if (in >> n) s.set.refuse = int(n);
    } else if (verb == "crash") {
        if (!(in >> name)) return false;
        s.set.crashes[name] = true;
    } else if (verb == "heal") {
        s.set.heal = true;
    } else if (verb == "sigaction") {
        s.set.sigaction = true;
    } else if (verb == "reset") {
        s.set = Settings{};
        restore_signals();
    } else {
        return false;
    }
    in.clear();
    return !(in >> rest);
}

std::string read_timeline() {
    std::ostringstream out;
    for (auto &e : s.set.timeline)
        out << e.device << ' ' << e.stream << ' ' << e.kind << ' ' << e.bytes << ' ' << e.begin << ' ' << e.end << '\n';
    return out.str();
}

std::string read_live() {
    size_t bytes = 0;
    for (auto &[address, memory] : s.allocations) bytes += memory->size;
    std::ostringstream out;
    out << s.contexts.size() << ' ' << s.streams.size() << ' ' << s.events.size() << ' ' << s.modules.size() << ' '
        << s.allocations.size() << ' ' << s.registered.size() << ' ' << bytes << ' ' << s.workers << '\n';
    return out.str();
}

std::string read_flags() {
    std::string out;
    for (auto &f : s.set.flags) out += f + '\n';
    return out;
}

std::string read_violations() {
    std::string out;
    for (auto &v : s.set.violations) out += v + '\n';
    return out;
}

}  // namespace

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - loaded).count();
}

void violate(const std::string &text) {
    if (s.set.violations.size() < max_violations) s.set.violations.push_back(text);
}

int missing(const char *call, int code) {
    violate(std::string(call) + ": it is not there, or another context's");
    return code;
}

int fault(bool async, const std::vector<std::string> &names) {
    for (auto &f : s.set.faults) {
        if (f.async != async || f.times == 0 || std::find(names.begin(), names.end(), f.name) == names.end()) continue;
        if (f.after > 0) {
            f.after--;
            continue;
        }
        if (f.times > 0) f.times--;
        return f.code;
    }
    return SUCCESS;
}

void linger(Lock &lock, const std::vector<std::string> &names, const std::function<bool()> &gone) {
    int64_t micros = 0;
    for (auto &name : names) {
        if (s.set.crashes.count(name)) abort();
        auto it = s.set.delays.find(name);
        if (it != s.set.delays.end()) micros = std::max(micros, it->second);
    }
    if (micros > 0) s.changed.wait_for(lock, std::chrono::microseconds(micros), gone);
    s.changed.wait(lock, [&] {
        return gone() || std::none_of(names.begin(), names.end(), [](auto &name) { return s.set.hangs.count(name) > 0; });
    });
}

static bool control(const std::string &commands) {
    Lock lock(s.mu);
    std::istringstream in(commands);
    bool understood = true;
    for (std::string one; understood && std::getline(in, one, ';');) understood = command(one);
    s.changed.notify_all();
    return understood;
}

void disturb_signals() {
    if (!s.set.sigaction) return;
    restore_signals();  // lest the handler before ours be ours
    for (int i = 0; i < 2; i++) {
        struct sigaction ours;
        memset(&ours, 0, sizeof ours);
        ours.sa_sigaction = on_signal;
        ours.sa_flags = SA_SIGINFO | SA_RESTART;
        sigaction(disturbed[i], &ours, &before[i]);
    }
}

// The same commands, for a program that a test only starts.
static const bool from_environment = [] {
    const char *commands = getenv("FAKECUDA");
    if (!commands || control(commands)) return true;
    fprintf(stderr, "fakecuda: FAKECUDA=%s is not understood\n", commands);
    abort();
}();

}  // namespace fake

using namespace fake;

// fake_control runs commands that are separated by semicolons, and returns 0 when all
// were understood.
API fake_control(const char *commands) { return control(commands) ? 0 : 1; }

// fake_read writes the text of what, with a zero, as far as it fits into n bytes, and
// returns its whole length.
extern "C" __attribute__((visibility("default"))) size_t fake_read(const char *what, char *buf, size_t n) {
    Lock lock(s.mu);
    std::string name = what, text;
    if (name == "timeline") text = read_timeline();
    if (name == "flags") text = read_flags();
    if (name == "live") text = read_live();
    if (name == "violations") text = read_violations();
    if (n > 0) snprintf(buf, n, "%s", text.c_str());
    return text.size();
}
