package serve

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/tensorferry/tensorferry/compat/kpu"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	storefiles "github.com/tensorferry/tensorferry/store/files"
	"github.com/tensorferry/tensorferry/store/folder"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/terms"
)

// BBRText is the help of --bbr.
const BBRText = "send by the congestion control BBR, which stands losses;\nthe kernel must allow it"

// What settings mean, and their bounds.
const (
	DefaultListen  = "127.0.0.1:50051"
	defaultMetrics = "127.0.0.1:9464"
	off            = "off" // an address without a listener
	// leastMemory is the minimum of --memory: four of the largest chunks, so that a call can
	// have an input and a result, each with one chunk in transit.
	leastMemory = 4 * frame.ChunkBytesCeiling
	// storeMemory is --store without a folder. The store then uses 1/storeShare of --memory,
	// in addition to --memory.
	storeMemory = "memory"
	storeShare  = 4
	evictLRU    = ",evict=lru" // may follow storeMemory, and its size
	LogJSON     = "json"       // of --log-format
	// keptDescriptors are not for connections, or a quarter of all if that is more: metrics and
	// probes have 64 connections each, 32 more are refused at a time, and the rest is for the
	// files of the store and the processes of models.
	keptDescriptors = 256
	// leastStore is the minimum of --store memory:SIZE, enough for a few hundred small
	// tensors. Each takes whole pages, so a size with a forgotten unit would hold none.
	leastStore = 1 << 20
)

// Config is the configuration of serve, from its flags or as configure says.
type Config struct {
	server                        server.Config // serve sets the fields without flags
	Engines                       engineConfig
	listen, metrics, health       string
	splitlearn, splitlearnModel   string
	insecure, pprof, verbose, bbr bool
	roles                         string // a file
	secrets                       identity.ServerFiles
	store                         storeFlag
	files                         []string // [name=]folder
	logFormat, logLevel           string
	drain                         time.Duration
	lanes                         int
	Services                      []string      // variables that were ignored
	Former                        []*pflag.Flag // settings that went, and were set
	kpu                           string        // ADDRESS,model=NAME,source=NAME
	kpuConfig                     kpu.Config
}

// Flags declares every setting: its name, default, range and meaning.
func (c *Config) Flags(f *pflag.FlagSet) {
	f.SortFlags = false
	f.StringVar(&c.listen, "listen", DefaultListen, "`address` to listen on:\nhost:port or unix:/path")
	f.StringVar(&c.metrics, "metrics", defaultMetrics, "`address` of /metrics and /healthz,\nor off")
	f.StringVar(&c.health, "health-listen", off, "`address` of gRPC health and /healthz for probes, which\nneed neither TLS nor a token, or off")
	f.StringVar(&c.kpu, "kpu", off, "`address` of the service of kpu.torch, for its clients,\nor off; ADDRESS,model=NAME,source=NAME names the model\nof their StreamTensors and the source, or else the stored\ntensor, of their SendTensors")
	f.StringVar(&c.splitlearn, "splitlearn", off, "`address` of the service of SplitLearnComm, for its clients,\nor off; ADDRESS,model=NAME names the model that they\ncall when they name none")
	f.StringVar(&c.secrets.Cert, "tls-cert", "", "`file` with the server's certificate; enables TLS")
	f.StringVar(&c.secrets.Key, "tls-key", "", "`file` with the server's private key")
	f.StringVar(&c.secrets.ClientCA, "tls-client-ca", "", "`file` with the CA of client certificates;\nclients then need such a certificate or a token")
	f.StringVar(&c.secrets.Tokens, "token-file", "", "`file` with a client's name and token on each line;\nclients then need a token or a certificate")
	f.StringVar(&c.roles, "roles", "", "`file` with a line per client that says what it may do;\nothers may do nothing")
	f.BoolVar(&c.insecure, "insecure", false, "accept other machines without encryption or authentication")
	f.StringVar(&c.Engines.engine, "engine", AutoEngine, "`where` models run: cpu, a device such as cuda:0,\nor auto for cuda:0 if it works, else cpu")
	f.StringArrayVar(&c.Engines.models, "model", nil, "serve the model in [name=]`folder`[@engine]; repeatable")
	f.BoolVar(&c.Engines.demo, "demo", false, "also serve the models that tensorferry demo --server needs")
	f.BoolVar(&c.Engines.slow, "slow", false, "also serve the model slow, which answers after its\nparameter delay, to test timeouts")
	settings.Size(f, &c.Engines.memory, "memory", 0, leastMemory, 1<<62, "memory limit for tensors in `bytes`, at least 16MiB\n(default a quarter of the process's memory)")
	settings.Size(f, &c.Engines.pinned, "pinned", 0, leastMemory, 1<<62, "page-locked memory per device in `bytes`, at least 16MiB\n(default a sixteenth of the process's memory, at most 1GiB)")
	f.StringVar(&c.Engines.driver, "cuda-driver", "", "NVIDIA driver library `file`\n(default the system's libcuda.so.1)")
	f.BoolVar(&c.Engines.exitOnLoss, "exit-on-device-loss", false, "when a device fails for good, stop as if interrupted and\nexit with 8, so that a supervisor starts a new process;\nmodels elsewhere stop too")
	f.StringArrayVar(&c.Engines.python, "python", []string{}, "serve `name=module:function`, a Python function, class\nor torch module; repeatable. Append ,blocks=FIRST:END to\nserve only these blocks of a module, ,train to let clients\ntrain it, ,checkpoint=FOLDER to keep its steps,\n,checkpoint-every=STEPS (default 100),\n,lease=DURATION (default 30s)")
	settings.Commas(f, "python")
	settings.Count(f, &c.Engines.pythonProcesses, "python-processes", 1, "processes per Python model")
	settings.Count(f, &c.Engines.pythonThreads, "python-threads", 0, "threads per Python process\n(default the number of CPUs divided by --python-processes)")
	f.StringArrayVar(&c.Engines.pythonEnv, "python-env", []string{}, "environment variable of Python processes, `name=value`;\nrepeatable")
	settings.Count(f, &c.Engines.workers, "workers", 0, "blocks computed in parallel (default the number of CPUs)")
	c.store.text = storeMemory
	settings.Option(f, "store", "store", "`where` pushed tensors are stored: memory,\nmemory:2GiB (at least 1MiB) or a folder; with\nmemory:2GiB,evict=lru, a full store evicts the least\nrecently used tensors instead of refusing new ones", c.store.set, func() string { return c.store.text })
	f.StringArrayVar(&c.files, "files", []string{}, "also let clients pull the model files below `[name=]folder`,\nwhich is never written to; repeatable")
	f.BoolVar(&c.server.Reflection, "reflection", true, "serve gRPC reflection, which grpcurl needs")
	f.BoolVar(&c.pprof, "pprof", false, "serve Go profiles at /debug/pprof/ on the metrics address")
	settings.Choice(f, &c.logFormat, "log-format", "log `format`", "text", LogJSON)
	settings.Choice(f, &c.logLevel, "log-level", "lowest log `level`", "info", "debug", "warn", "error")
	f.BoolVarP(&c.verbose, "verbose", "v", false, "log every RPC; same as --log-level debug")
	settings.Duration(f, &c.drain, "drain", server.DefaultDrainWait, 0, "how long a stopping server waits for open calls")

	d := terms.DefaultLimits()
	settings.Size(f, &c.server.Session.TensorBytes, "max-tensor", d.TensorBytes, 1, 1<<62, "largest tensor accepted, in `bytes`")
	settings.Size(f, &c.server.Session.ChunkBytes, "max-chunk", d.ChunkBytes, 1, frame.ChunkBytesCeiling, "largest chunk accepted, in `bytes`")
	settings.Count(f, &c.server.Sessions, "max-sessions", server.DefaultSessions, "open sessions")
	settings.Count(f, &c.server.QueuedCalls, "max-calls", server.DefaultQueuedCalls, "open calls in all sessions")
	settings.Size(f, &c.server.StoredBytes, "max-stored", server.DefaultStoredBytes, 1, 1<<62, "largest tensor that may be pushed, in `bytes`")
	settings.Count(f, &c.server.Connections, "max-connections", server.DefaultConnections, "open connections; further ones are closed")
	settings.CountIn(f, &c.lanes, "lanes", server.DefaultLanes, 0, server.DefaultLanes, "extra connections per session for large tensors;\n0 for none")
	f.BoolVar(&c.bbr, "bbr", false, BBRText)
	settings.Duration(f, &c.server.Session.ChunkIdle, "chunk-idle", d.ChunkIdle, time.Millisecond, "cancel a call that moves no chunk for this long")
	settings.Duration(f, &c.server.Session.InputIdle, "input-idle", d.InputIdle, time.Millisecond, "the same, while the client reports that its own input\nor output is idle")
	settings.Duration(f, &c.server.Session.SessionIdle, "session-idle", d.SessionIdle, time.Millisecond, "close a session that has no call for this long")
	settings.Duration(f, &c.server.Keepalive, "keepalive", server.DefaultKeepalive, time.Second, "ping a client that is silent for this long")
	c.former(f)
}

// storeFlag says where pushed tensors are stored.
type storeFlag struct {
	text   string // as set takes it
	folder string // empty: in memory
	bytes  int64  // limit in memory; 0 is the default
	evicts bool
}

// set parses memory or memory:SIZE, perhaps with evictLRU, or a folder.
func (s *storeFlag) set(text string) error {
	where, evicts := strings.CutSuffix(text, evictLRU)
	size, inMemory := strings.CutPrefix(where, storeMemory+":")
	switch {
	case text == "":
		return errors.New("use memory, memory:2GiB or a folder")
	case where == storeMemory:
		*s = storeFlag{text: text, evicts: evicts}
		return nil
	case !inMemory && evicts:
		return fmt.Errorf("a folder evicts nothing; use memory:2GiB%s", evictLRU)
	case !inMemory && strings.HasPrefix(text, storeMemory) && !strings.Contains(text, "/"):
		return fmt.Errorf("use memory:2GiB; a folder of that name is ./%s", text)
	case !inMemory:
		*s = storeFlag{text: text, folder: text}
		return nil
	case strings.Contains(size, ","):
		return fmt.Errorf("only %s may follow the size", evictLRU)
	}
	n, err := settings.ParseSize(size)
	if err != nil {
		return err
	}
	if n < leastStore {
		return fmt.Errorf("use at least %s, or %s", settings.FormatSize(leastStore), storeMemory)
	}
	*s = storeFlag{text: text, bytes: n, evicts: evicts}
	return nil
}

// open opens the store. A store in memory takes its slabs from h. Without a size, its
// limit is a share of h's budget, in addition to that budget.
func (s *storeFlag) open(h *cpu.Host, log *slog.Logger) (store.Store, error) {
	if s.folder != "" {
		d, err := folder.OpenWithFiles(s.folder, folder.Config{Log: log})
		return d, fail.Lasting(err)
	}
	_, _, limit := h.Budget().Used()
	bytes := cmp.Or(s.bytes, limit/storeShare)
	if s.evicts {
		return memory.NewCache(h.Pool(), bytes), nil
	}
	return memory.New(h.Pool(), bytes), nil
}

// withFiles adds the model files of folders to a store. It closes the store on failure.
func withFiles(s store.Store, folders []string, log *slog.Logger) (store.Store, error) {
	var all []*storefiles.Store
	var names []string
	for _, text := range folders {
		name, dir := files.NameOf(text)
		if slices.Contains(names, name) {
			err := fail.Usage("--files %s: another folder has the name %q; use --files NAME=FOLDER", text, name)
			return nil, errors.Join(err, storefiles.Beside(s, all...).Close())
		}
		names = append(names, name)
		f, err := storefiles.Open(dir, storefiles.Config{Name: name, Log: log})
		if err != nil {
			return nil, errors.Join(fail.Mistake(fmt.Errorf("--files %s: %w", text, err)), storefiles.Beside(s, all...).Close())
		}
		all = append(all, f)
	}
	return storefiles.Beside(s, all...), nil
}

// Child is the configuration of a server that another process has started for itself.
func (c *Config) Child() { c.metrics, c.logLevel = off, "warn" }

// identity reads the files that secure the server. It returns nil if there are none.
func (c *Config) identity(log *slog.Logger) (*identity.Server, error) {
	switch {
	case c.secrets == identity.ServerFiles{}:
		return nil, nil
	case c.secrets.Cert == "" || c.secrets.Key == "":
		return nil, fail.Usage("use --tls-cert and --tls-key together; --tls-client-ca and --token-file need both, because a token must not be sent unencrypted")
	}
	id, err := identity.NewServer(c.secrets, log)
	if err != nil {
		return nil, fail.Mistake(fail.Hinted(err, "tensorferry cert creates certificates to try out"))
	}
	return id, nil
}

// readRoles reads the file of --roles. It returns nil if there is none.
func (c *Config) readRoles(id *identity.Server, log *slog.Logger) (*roles, error) {
	if c.roles == "" {
		return nil, nil
	}
	if id == nil || id.Open() {
		return nil, fail.Usage("--roles %s: without --token-file or --tls-client-ca the server does not know who a client is", c.roles)
	}
	r, err := readRoles(c.roles, log)
	if err != nil {
		return nil, fail.Usage("--roles: %w", err)
	}
	return r, nil
}

// checkExposed rejects an unsecured listener that other machines can reach, unless --insecure.
func (c *Config) checkExposed(flag, address string, id *identity.Server) error {
	switch {
	case c.insecure || !exposed(address):
		return nil
	case id == nil:
		return fail.Usage("--%s %s: other machines could connect without encryption; use --tls-cert and --tls-key (tensorferry cert creates them) with --token-file or --tls-client-ca, or --insecure to allow it", flag, address)
	case id.Open():
		return fail.Usage("--%s %s: other machines could connect without authentication; use --token-file or --tls-client-ca, or --insecure to allow it", flag, address)
	}
	return nil
}

// goOnly stands where a setting is only a field for programs that embed a server.
const goOnly = "a field of server.Config in Go"

// former declares settings that went and still apply in this version. The help of each, which
// nobody is shown, is what to write instead.
func (c *Config) former(flags *pflag.FlagSet) {
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.StringVar(&c.kpuConfig.Model, "kpu-model", kpu.DefaultModel, "--kpu ADDRESS,model=NAME")
	f.StringVar(&c.kpuConfig.Source, "kpu-source", kpu.DefaultSource, "--kpu ADDRESS,source=NAME")
	f.StringVar(&c.splitlearnModel, "splitlearn-model", "", "--splitlearn ADDRESS,model=NAME")
	t := &c.Engines.training
	f.StringArrayVar(&c.Engines.train, "train", []string{}, "--python NAME=module:function,train")
	f.StringVar(&t.checkpoints, "checkpoint", "", "--python NAME=module:function,checkpoint=FOLDER")
	settings.Count(f, &t.every, "checkpoint-every", checkpointEvery, "--python NAME=module:function,checkpoint-every=STEPS")
	settings.Duration(f, &t.lease, "train-lease", trainLease, 0, "--python NAME=module:function,lease=DURATION")

	s, d := &c.server, terms.DefaultLimits()
	settings.Size(f, &s.Session.AllowanceBytes, "allowance", d.AllowanceBytes, 1, frame.AllowanceCeiling, goOnly)
	settings.Size(f, &s.WindowBytes, "window", server.DefaultWindow, 64<<10, math.MaxInt32, goOnly)
	settings.Count(f, &s.Transfers, "max-transfers", server.DefaultTransfers, goOnly)
	settings.Count(f, &s.Session.OpenCalls, "max-session-calls", d.OpenCalls, goOnly)
	settings.Count(f, &s.Session.OpenTensors, "max-session-tensors", d.OpenTensors, goOnly)
	settings.Count(f, &s.StreamsPerConnection, "max-streams", server.DefaultStreamsPerConn, goOnly)
	settings.Count(f, &s.ThinFrames, "max-thin-frames", server.DefaultThinFrames, goOnly)
	settings.Size(f, &s.HeaderListBytes, "max-header-list", server.DefaultHeaderListBytes, 1<<10, 1<<24, goOnly)
	settings.Duration(f, &s.MemoryWait, "memory-wait", server.DefaultMemoryWait, time.Millisecond, goOnly)
	settings.Duration(f, &s.Session.FirstFrame, "first-frame", d.FirstFrame, time.Millisecond, goOnly)
	settings.Duration(f, &s.Handshake, "handshake", server.DefaultHandshake, time.Millisecond, goOnly)
	settings.Duration(f, &s.KeepaliveTimeout, "keepalive-timeout", server.DefaultKeepaliveTimeout, time.Millisecond, goOnly)
	settings.Duration(f, &s.KeepaliveMin, "keepalive-min", server.DefaultKeepaliveMin, time.Millisecond, goOnly)
	f.VisitAll(func(flag *pflag.Flag) {
		flag.Hidden = true
		flags.AddFlag(flag)
	})
}
