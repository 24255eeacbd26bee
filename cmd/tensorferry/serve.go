package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/compat/kpu"
	"github.com/tensorferry/tensorferry/compat/splitlearn"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/metrics"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/terms"
)

const (
	defaultListen  = "127.0.0.1:50051"
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
	logJSON     = "json"       // of --log-format
	// keptDescriptors are not for connections, or a quarter of all if that is more: metrics and
	// probes have 64 connections each, 32 more are refused at a time, and the rest is for the
	// files of the store and the processes of models.
	keptDescriptors = 256
	// leastStore is the minimum of --store memory:SIZE, enough for a few hundred small
	// tensors. Each takes whole pages, so a size with a forgotten unit would hold none.
	leastStore = 1 << 20
)

// errCut is the error of a server that had to cancel calls when it stopped.
var errCut = errors.New("calls that were still open were cancelled")

// errDeviceLost is the error of a server that ended because a device was lost.
var errDeviceLost = errors.New("a device was lost; its error is in the log, and a new process can use it again")

// serveConfig is the configuration of serve, from its flags or as configure says.
type serveConfig struct {
	server                        server.Config // serve sets the fields without flags
	engines                       engineConfig
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
	services                      []string // variables that were ignored
	kpu                           string   // an address
	kpuConfig                     kpu.Config
}

// flags declares every setting: its name, default, range and meaning.
func (c *serveConfig) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&c.listen, "listen", defaultListen, "`address` to listen on:\nhost:port or unix:/path")
	f.StringVar(&c.metrics, "metrics", defaultMetrics, "`address` of /metrics and /healthz,\nor off")
	f.StringVar(&c.health, "health-listen", off, "`address` of gRPC health and /healthz for probes, which\nneed neither TLS nor a token, or off")
	f.StringVar(&c.kpu, "kpu", off, "`address` of the service of kpu.torch, for its clients,\nor off")
	f.StringVar(&c.kpuConfig.Model, "kpu-model", kpu.DefaultModel, "the model `name` that their StreamTensors runs")
	f.StringVar(&c.kpuConfig.Source, "kpu-source", kpu.DefaultSource, "the `name` of the source, or else of the stored tensor,\nthat their SendTensors sends")
	f.StringVar(&c.splitlearn, "splitlearn", off, "`address` of the service of SplitLearnComm, for its clients,\nor off")
	f.StringVar(&c.splitlearnModel, "splitlearn-model", "", "the model `name` that they call when they name none")
	f.StringVar(&c.secrets.Cert, "tls-cert", "", "`file` with the server's certificate; enables TLS")
	f.StringVar(&c.secrets.Key, "tls-key", "", "`file` with the server's private key")
	f.StringVar(&c.secrets.ClientCA, "tls-client-ca", "", "`file` with the CA of client certificates;\nclients then need such a certificate or a token")
	f.StringVar(&c.secrets.Tokens, "token-file", "", "`file` with a client's name and token on each line;\nclients then need a token or a certificate")
	f.StringVar(&c.roles, "roles", "", "`file` with a line per client that says what it may do;\nothers may do nothing")
	f.BoolVar(&c.insecure, "insecure", false, "accept other machines without encryption or authentication")
	f.StringVar(&c.engines.engine, "engine", autoEngine, "`where` models run: cpu, a device such as cuda:0,\nor auto for cuda:0 if it works, else cpu")
	f.StringArrayVar(&c.engines.models, "model", nil, "serve the model in [name=]`folder`[@engine]; repeatable")
	f.BoolVar(&c.engines.demo, "demo", false, "also serve the model that tensorferry demo --server needs")
	f.BoolVar(&c.engines.slow, "slow", false, "also serve the model slow, which answers after its\nparameter delay, to test timeouts")
	sizeVar(f, &c.engines.memory, "memory", 0, leastMemory, 1<<62, "memory limit for tensors in `bytes`, at least 16MiB\n(default a quarter of the process's memory)")
	sizeVar(f, &c.engines.pinned, "pinned", 0, leastMemory, 1<<62, "page-locked memory per device in `bytes`, at least 16MiB\n(default a sixteenth of the process's memory, at most 1GiB)")
	f.StringVar(&c.engines.driver, "cuda-driver", "", "NVIDIA driver library `file`\n(default the system's libcuda.so.1)")
	f.BoolVar(&c.engines.exitOnLoss, "exit-on-device-loss", false, "when a device fails for good, stop as if interrupted and\nexit with 8, so that a supervisor starts a new process;\nmodels elsewhere stop too")
	f.StringArrayVar(&c.engines.python, "python", []string{}, "serve `name=module:function`, a Python function, class\nor torch module; repeatable")
	countVar(f, &c.engines.pythonProcesses, "python-processes", 1, "processes per Python model")
	countVar(f, &c.engines.pythonThreads, "python-threads", 0, "threads per Python process\n(default the number of CPUs divided by --python-processes)")
	f.StringArrayVar(&c.engines.train, "train", []string{}, "let clients train the Python model `name`, a torch module;\nrepeatable")
	f.StringVar(&c.engines.checkpoints, "checkpoint", "", "`folder` for checkpoints of the models that train,\nfrom which they go on")
	countVar(f, &c.engines.checkpointEvery, "checkpoint-every", 100, "steps between two checkpoints")
	durationVar(f, &c.engines.lease, "train-lease", 30*time.Second, 0, "how long a client that is cut off keeps others from training")
	f.StringArrayVar(&c.engines.pythonEnv, "python-env", []string{}, "environment variable of Python processes, `name=value`;\nrepeatable")
	countVar(f, &c.engines.workers, "workers", 0, "blocks computed in parallel (default the number of CPUs)")
	c.store.text = storeMemory
	f.Var(option{kind: "store", set: c.store.set, text: func() string { return c.store.text }}, "store", "`where` pushed tensors are stored: memory,\nmemory:2GiB (at least 1MiB) or a folder; with\nmemory:2GiB,evict=lru, a full store evicts the least\nrecently used tensors instead of refusing new ones")
	f.StringArrayVar(&c.files, "files", []string{}, "also let clients pull the model files below `[name=]folder`,\nwhich is never written to; repeatable")
	f.BoolVar(&c.server.Reflection, "reflection", true, "serve gRPC reflection, which grpcurl needs")
	f.BoolVar(&c.pprof, "pprof", false, "serve Go profiles at /debug/pprof/ on the metrics address")
	choiceVar(cmd, &c.logFormat, "log-format", "log `format`", "text", logJSON)
	choiceVar(cmd, &c.logLevel, "log-level", "lowest log `level`", "info", "debug", "warn", "error")
	f.BoolVarP(&c.verbose, "verbose", "v", false, "log every RPC; same as --log-level debug")
	durationVar(f, &c.drain, "drain", server.DefaultDrainWait, 0, "how long a stopping server waits for open calls")

	d := terms.DefaultLimits()
	sizeVar(f, &c.server.Session.TensorBytes, "max-tensor", d.TensorBytes, 1, 1<<62, "largest tensor accepted, in `bytes`")
	sizeVar(f, &c.server.Session.ChunkBytes, "max-chunk", d.ChunkBytes, 1, frame.ChunkBytesCeiling, "largest chunk accepted, in `bytes`")
	sizeVar(f, &c.server.Session.AllowanceBytes, "allowance", d.AllowanceBytes, 1, frame.AllowanceCeiling, "`bytes` that a session may send without credit")
	sizeVar(f, &c.server.WindowBytes, "window", server.DefaultWindow, 64<<10, math.MaxInt32, "flow-control window of a connection in `bytes`")
	countVar(f, &c.server.Sessions, "max-sessions", server.DefaultSessions, "open sessions")
	countVar(f, &c.server.QueuedCalls, "max-calls", server.DefaultQueuedCalls, "open calls in all sessions")
	countVar(f, &c.server.Transfers, "max-transfers", server.DefaultTransfers, "open pushes and pulls")
	sizeVar(f, &c.server.StoredBytes, "max-stored", server.DefaultStoredBytes, 1, 1<<62, "largest tensor that may be pushed, in `bytes`")
	countVar(f, &c.server.Session.OpenCalls, "max-session-calls", d.OpenCalls, "open calls per session")
	countVar(f, &c.server.Session.OpenTensors, "max-session-tensors", d.OpenTensors, "tensors that a session may send at the same time")
	countVar(f, &c.server.Connections, "max-connections", server.DefaultConnections, "open connections; further ones are closed")
	countsVar(f, &c.lanes, "lanes", server.DefaultLanes, 0, server.DefaultLanes, "extra connections per session for large tensors;\n0 for none")
	f.BoolVar(&c.bbr, "bbr", false, bbrText)
	countVar(f, &c.server.StreamsPerConnection, "max-streams", server.DefaultStreamsPerConn, "open RPCs per connection")
	countVar(f, &c.server.ThinFrames, "max-thin-frames", server.DefaultThinFrames, "frames per second and connection that carry\nless than 3 KiB and open nothing")
	sizeVar(f, &c.server.HeaderListBytes, "max-header-list", server.DefaultHeaderListBytes, 1<<10, 1<<24, "largest metadata of an RPC in `bytes`")
	durationVar(f, &c.server.MemoryWait, "memory-wait", server.DefaultMemoryWait, time.Millisecond, "how long a call waits for memory")
	durationVar(f, &c.server.Session.FirstFrame, "first-frame", d.FirstFrame, time.Millisecond, "how long a new session may take to say hello")
	durationVar(f, &c.server.Session.ChunkIdle, "chunk-idle", d.ChunkIdle, time.Millisecond, "cancel a call that moves no chunk for this long")
	durationVar(f, &c.server.Session.InputIdle, "input-idle", d.InputIdle, time.Millisecond, "the same, while the client reports that its own input\nor output is idle")
	durationVar(f, &c.server.Session.SessionIdle, "session-idle", d.SessionIdle, time.Millisecond, "close a session that has no call for this long")
	durationVar(f, &c.server.Handshake, "handshake", server.DefaultHandshake, time.Millisecond, "how long the handshake of a connection may take")
	durationVar(f, &c.server.Keepalive, "keepalive", server.DefaultKeepalive, time.Second, "ping a client that is silent for this long")
	durationVar(f, &c.server.KeepaliveTimeout, "keepalive-timeout", server.DefaultKeepaliveTimeout, time.Millisecond, "how long its answer may take")
	durationVar(f, &c.server.KeepaliveMin, "keepalive-min", server.DefaultKeepaliveMin, time.Millisecond, "minimum time between a client's own pings")
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
	n, err := parseSize(size)
	if err != nil {
		return err
	}
	if n < leastStore {
		return fmt.Errorf("use at least %s, or %s", formatSize(leastStore), storeMemory)
	}
	*s = storeFlag{text: text, bytes: n, evicts: evicts}
	return nil
}

// open opens the store. A store in memory takes its slabs from h. Without a size, its
// limit is a share of h's budget, in addition to that budget.
func (s *storeFlag) open(h *cpu.Host, log *slog.Logger) (store.Store, error) {
	if s.folder != "" {
		d, err := store.OpenDir(s.folder, store.FolderConfig{Log: log})
		return d, lasting(err)
	}
	_, _, memory := h.Budget().Used()
	bytes := cmp.Or(s.bytes, memory/storeShare)
	if s.evicts {
		return store.NewCache(h.Pool(), bytes), nil
	}
	return store.NewMemory(h.Pool(), bytes), nil
}

// besideFiles adds the model files of folders to a store. It closes the store on failure.
func besideFiles(s store.Store, folders []string, log *slog.Logger) (store.Store, error) {
	var all []*store.Files
	var names []string
	for _, text := range folders {
		name, folder := nameOf(text)
		if slices.Contains(names, name) {
			err := usage("--files %s: another folder has the name %q; use --files NAME=FOLDER", text, name)
			return nil, errors.Join(err, store.Beside(s, all...).Close())
		}
		names = append(names, name)
		f, err := store.OpenFiles(folder, store.FilesConfig{Name: name, Log: log})
		if err != nil {
			return nil, errors.Join(mistake(fmt.Errorf("--files %s: %w", text, err)), store.Beside(s, all...).Close())
		}
		all = append(all, f)
	}
	return store.Beside(s, all...), nil
}

func serveCommand() *cobra.Command {
	var cfg serveConfig
	var child, printed bool
	c := &cobra.Command{
		Use:   "serve",
		Short: "serve the built-in models and your own",
		Long: `Serve runs a server until it is interrupted. It then accepts no new calls, gives open
calls some time to finish (--drain), and exits; the exit code is 1 if it had to cancel
calls. A second interrupt, half a second or more after the first, ends it immediately.

A model is a folder with model.json and weights.safetensors (docs/engine.md), or
Python code that runs in its own processes (docs/worker.md). TENSORFERRY_PYTHON names
the Python interpreter; the default is python3.

Flags can also be set as environment variables (TENSORFERRY_MAX_CALLS for --max-calls)
or in a YAML file (max-calls: 100). A flag overrides the environment, and the
environment overrides the file. Sizes are in bytes or have a unit, such as 512MiB or
2GB; durations are written as 10s, 1m30s or 250ms. See docs/operating.md.`,
		Example: `  tensorferry serve
  tensorferry serve --listen unix:/tmp/ferry.sock --model trunk=models/trunk
  tensorferry serve --python trunk=models:make_trunk --python-processes 2
  tensorferry serve --config ferry.yaml --print-config`,
		Args: takes(0),
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithCancel(c.Context())
			defer cancel()
			environ, ready := os.Environ(), io.Discard
			if child {
				// The parent has set everything, and several children may run at once.
				environ, ready = nil, c.OutOrStdout()
				cfg.metrics, cfg.logLevel = off, "warn"
				go func() { // ends with stdin, at the latest with the process
					_, _ = io.Copy(io.Discard, c.InOrStdin())
					cancel()
				}()
			}
			from, services, err := configure(c.Flags(), environ)
			cfg.services = services
			if err != nil {
				return err
			}
			if printed {
				return printConfig(c.OutOrStdout(), c.Flags(), from)
			}
			return serve(ctx, cfg, ready)
		},
	}
	cfg.flags(c)
	f := c.Flags()
	f.String("config", "", "read settings from a YAML `file`; also TENSORFERRY_CONFIG")
	f.BoolVar(&printed, "print-config", false, "print all settings as a config file, with origins, and exit")
	f.BoolVar(&child, "child", false, "print the address to stdout, and stop when stdin ends")
	f.StringVar(&cfg.engines.pythonFD, "python-fd", "", "serve the Python process at the other end of a socket, as `name=descriptor`, and exit when it does")
	f.Lookup("child").Hidden, f.Lookup("python-fd").Hidden = true, true
	complete(c, "engine", []string{autoEngine, cpuEngine})
	return c
}

// serve runs a server until ctx ends. Once it listens, it writes its address to ready.
func serve(ctx context.Context, c serveConfig, ready io.Writer) (err error) {
	log, lines := newLog(c)
	defer lines.end()
	id, err := c.identity(log)
	if err == nil {
		err = errors.Join(c.mayOpen("listen", c.listen, id), c.mayOpen("metrics", c.metrics, id))
		for _, f := range c.dropIns() {
			err = errors.Join(err, c.mayOpen(f.flag, f.address, id))
		}
	}
	if err != nil {
		return err
	}
	may, err := c.readRoles(id, log)
	if err != nil {
		return err
	}
	if len(c.services) > 0 {
		log.Debug("variables of a Kubernetes Service are ignored", slog.Any("variables", c.services))
	}
	if !hasTerminal() {
		onHangup.Store(new(func() {
			log.Info("hangup: certificates, keys, tokens and roles are read again")
			if id != nil {
				id.Reread()
			}
			if may != nil {
				may.reread()
			}
		}))
	}
	memory, from, unseen := leastOf(memlimit.FromCgroup, memlimit.FromSystem)
	log.Info("starting", slog.String("version", version), slog.Int("pid", os.Getpid()), slog.String("memory", sizeText(memory)), slog.String("memory_from", from))
	if unseen != nil && from != "GOMEMLIMIT" {
		log.Warn("the memory limit of this container, if it has one, cannot be seen: set --memory and GOMEMLIMIT", slog.String("reason", unseen.Error()))
	}
	e, err := newEngines(c.engines, log)
	if err != nil {
		return err
	}
	defer e.Close()
	pushed, err := c.store.open(e.host, log)
	if err != nil {
		return err
	}
	tensors, err := besideFiles(pushed, c.files, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tensors.Close()) }()
	sources := new(store.Sources)
	if err := sources.Add("gen", store.Generator()); err != nil {
		return err
	}
	l, err := listen("listen", c.listen, c.bbr)
	if err != nil {
		return err
	}
	cfg, registry := c.server, metrics.NewRegistry()
	if most := connectionsOf(proc.MostDescriptors()); cfg.Connections > most {
		log.Warn("--max-connections is more than the descriptors allow: raise the hard limit (ulimit -Hn, LimitNOFILE)", slog.Int("set", cfg.Connections), slog.Int("used", most))
		cfg.Connections = most
	}
	cfg.Version, cfg.Models, cfg.Pool, cfg.Budget = version, e.models, e.host.Pool(), e.host.Budget()
	cfg.Store, cfg.Sources, cfg.Log, cfg.Metrics, cfg.Lanes = tensors, sources, log, registry, cmp.Or(c.lanes, -1)
	if id != nil {
		cfg.Credentials, cfg.Identify = id.Credentials(), id.Principal
	}
	if may != nil {
		may.stored, cfg.Authorize = tensors, may.authorize
	}
	if cfg.Services, err = c.openDropIns(e.models, log); err != nil {
		return errors.Join(err, l.Close())
	}
	s, err := server.New(cfg)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	metrics.LogLines(registry, func() float64 { return float64(lines.dropped.Load()) })
	limitHeap(e, s, pushed)
	var draining atomic.Bool
	serving := func() bool { return !draining.Load() }
	watching := make(chan error, 2)
	at, unwatch, bad := beside("metrics", c.metrics, id, metrics.Handler(registry, serving, c.pprof), watching, log)
	defer unwatch()
	probes, unprobe, err := beside("health-listen", c.health, nil, metrics.Probes(serving, s.Health()), watching, log)
	defer unprobe()
	if err = errors.Join(bad, err); err != nil {
		s.Close()
		return errors.Join(err, l.Close())
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	log.Info("listening", slog.String("address", addressOf(l)), slog.String("metrics", at), slog.Int("models", len(e.models.Infos())), slog.String("store", c.store.text))
	if probes != off {
		log.Info("listening for probes", slog.String("address", probes))
	}
	addresses := append([]string{c.listen, c.metrics}, each(c.dropIns(), func(d dropIn) string { return d.address })...)
	for _, address := range addresses {
		if exposed(address) && (id == nil || id.Open()) {
			log.Warn("other machines can connect without authentication", slog.String("address", address), slog.Bool("encrypted", id != nil))
		}
	}
	fmt.Fprintln(ready, addressOf(l))
	select {
	case err := <-served:
		s.Close()
		return err
	case err := <-watching:
		s.Close()
		return errors.Join(err, <-served)
	case <-ctx.Done():
	case <-e.ended:
		log.Warn("the process of the model has exited")
	case <-e.lost:
		log.Warn("a device was lost, and --exit-on-device-loss is set")
		defer func() { err = errors.Join(errDeviceLost, err) }()
	}
	draining.Store(true)
	log.Info("draining", slog.Float64("at_most_seconds", c.drain.Seconds()))
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.drain)
	defer cancel()
	if err := s.Shutdown(drain); err != nil {
		log.Warn("stopped", slog.Bool("drained", false))
		return errors.Join(fmt.Errorf("%w after %s", errCut, shortDuration(c.drain)), <-served)
	}
	log.Info("stopped", slog.Bool("drained", true))
	return <-served
}

// connectionsOf returns how many connections so many descriptors allow, beside what else needs some.
func connectionsOf(descriptors int) int {
	return descriptors - max(descriptors/4, min(keptDescriptors, descriptors/2))
}

// dropIn is a service for the clients of another system.
type dropIn struct {
	flag, address, system, model string
	service                      func(l net.Listener) server.Service
}

func (c *serveConfig) dropIns() []dropIn {
	return []dropIn{
		{"kpu", c.kpu, "kpu.torch", c.kpuConfig.Model, c.kpuConfig.Service},
		{"splitlearn", c.splitlearn, "SplitLearnComm", c.splitlearnModel, func(l net.Listener) server.Service { return splitlearn.New(l, c.splitlearnModel) }},
	}
}

// openDropIns opens their listeners, for models that there are.
func (c *serveConfig) openDropIns(models *engine.Registry, log *slog.Logger) (all []server.Service, err error) {
	for _, f := range c.dropIns() {
		var l net.Listener
		switch {
		case err != nil || f.address == off:
			continue
		case f.model == "":
			err = usage("--%s needs --%[1]s-model, the model that its clients call", f.flag)
		case !slices.ContainsFunc(models.Infos(), func(i engine.Info) bool { return i.Name == f.model }):
			err = usage("--%s-model %s: no such model; add it with --model or --python", f.flag, f.model)
		default:
			l, err = listen(f.flag, f.address, c.bbr)
		}
		if err == nil {
			all = append(all, f.service(l))
			log.Info("listening for clients of another system", slog.String("system", f.system), slog.String("address", addressOf(l)), slog.String("model", f.model))
		}
	}
	if err != nil {
		for _, svc := range all {
			_ = svc.Listener.Close()
		}
	}
	return all, err
}

// beside serves h on the address of a flag, unless that is off, until stop; failed receives an
// end before. What other machines reach is secured by id, if there is one.
func beside(flag, address string, id *identity.Server, h http.Handler, failed chan<- error, log *slog.Logger) (at string, stop func(), err error) {
	if address == off {
		return off, func() {}, nil
	}
	l, err := listen(flag, address, false)
	if err != nil {
		return "", func() {}, err
	}
	var secure *tls.Config
	if id != nil && exposed(address) {
		secure, h = id.Config(), id.Handler(h)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var served sync.WaitGroup
	served.Go(func() { failed <- metrics.Serve(ctx, l, secure, h, log) }) // ends within a second of ctx
	return addressOf(l), func() { cancel(); served.Wait() }, nil
}

// identity reads the files that secure the server. It returns nil if there are none.
func (c *serveConfig) identity(log *slog.Logger) (*identity.Server, error) {
	switch {
	case c.secrets == identity.ServerFiles{}:
		return nil, nil
	case c.secrets.Cert == "" || c.secrets.Key == "":
		return nil, usage("use --tls-cert and --tls-key together; --tls-client-ca and --token-file need both, because a token must not be sent unencrypted")
	}
	id, err := identity.NewServer(c.secrets, log)
	if err != nil {
		return nil, mistake(hinted{err, "tensorferry cert creates certificates to try out"})
	}
	return id, nil
}

// readRoles reads the file of --roles. It returns nil if there is none.
func (c *serveConfig) readRoles(id *identity.Server, log *slog.Logger) (*roles, error) {
	if c.roles == "" {
		return nil, nil
	}
	if id == nil || id.Open() {
		return nil, usage("--roles %s: without --token-file or --tls-client-ca the server does not know who a client is", c.roles)
	}
	r, err := readRoles(c.roles, log)
	if err != nil {
		return nil, usage("--roles: %w", err)
	}
	return r, nil
}

// mayOpen rejects an unsecured listener that other machines can reach, unless --insecure.
func (c *serveConfig) mayOpen(flag, address string, id *identity.Server) error {
	switch {
	case c.insecure || !exposed(address):
		return nil
	case id == nil:
		return usage("--%s %s: other machines could connect without encryption; use --tls-cert and --tls-key (tensorferry cert creates them) with --token-file or --tls-client-ca, or --insecure to allow it", flag, address)
	case id.Open():
		return usage("--%s %s: other machines could connect without authentication; use --token-file or --tls-client-ca, or --insecure to allow it", flag, address)
	}
	return nil
}

// listen opens the listener of a flag, whose connections send by BBR if bbr.
func listen(flag, address string, bbr bool) (l net.Listener, err error) {
	var how net.ListenConfig
	if bbr {
		how.Control = lane.BBR
	}
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		path = strings.TrimPrefix(path, "//")
		l, err = net.Listen("unix", path)
		if errors.Is(err, syscall.EADDRINUSE) && abandoned(path) {
			l, err = net.Listen("unix", path)
		}
	} else if _, _, err = net.SplitHostPort(address); err == nil {
		l, err = how.Listen(context.Background(), "tcp", address)
	}
	if err == nil {
		return l, nil
	}
	if bad, ok := errors.AsType[*net.AddrError](err); ok {
		return nil, usage("--%s %q is not an address: %s; use host:port or unix:/path", flag, address, bad.Err)
	}
	hint := "choose another address with --" + flag
	if flag == "metrics" {
		hint += ", or turn it off with --metrics off"
	}
	return nil, lasting(hinted{fmt.Errorf("--%s %s: %w", flag, address, err), hint})
}

// exposed reports whether other machines can reach an address.
func exposed(address string) bool {
	host, _, err := net.SplitHostPort(address)
	ip := net.ParseIP(host)
	return err == nil && !strings.HasPrefix(address, "unix:") && host != "localhost" && (ip == nil || !ip.IsLoopback())
}

// abandoned removes a socket on which nothing listens, and no other file, if it can.
func abandoned(path string) bool {
	if i, err := os.Lstat(path); err != nil || i.Mode().Type() != os.ModeSocket {
		return false
	}
	c, err := net.Dial("unix", path)
	if err == nil {
		_ = c.Close() // a server is listening
	}
	return errors.Is(err, syscall.ECONNREFUSED) && os.Remove(path) == nil
}

// addressOf returns the address that a client dials.
func addressOf(l net.Listener) string {
	if l.Addr().Network() == "unix" {
		return "unix:" + l.Addr().String()
	}
	return l.Addr().String()
}
