// Package serve makes a server of settings, with its engines, store, roles and log; and the client
// that serves another process over a link.
package serve

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/spf13/pflag"

	"github.com/tensorferry/tensorferry/compat/splitlearn"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/metrics"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
)

// dropIn is a service for the clients of another system.
type dropIn struct {
	flag, address, system, model string
	service                      func(l net.Listener) server.Service
}

// dropIns returns what --kpu and --splitlearn ask for: ADDRESS,model=NAME.
func (c *Config) dropIns() (all []dropIn, err error) {
	add := func(d dropIn, setting string, names map[string]*string, service func(l net.Listener) server.Service) {
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		for name, to := range names {
			f.StringVar(to, name, *to, "")
		}
		address, bad := settings.Parts(setting, f)
		d.address, d.model, d.service = address, *names["model"], service
		switch {
		case bad != nil:
			err = errors.Join(err, fail.Usage("--%s %s: %w", d.flag, setting, bad))
		case address != off:
			all = append(all, d)
		}
	}
	k, s := c.kpuConfig, c.splitlearnModel
	add(dropIn{flag: "kpu", system: "kpu.torch"}, c.kpu, map[string]*string{"model": &k.Model, "source": &k.Source},
		func(l net.Listener) server.Service { return k.Service(l) })
	add(dropIn{flag: "splitlearn", system: "SplitLearnComm"}, c.splitlearn, map[string]*string{"model": &s},
		func(l net.Listener) server.Service { return splitlearn.New(l, s) })
	return all, err
}

// openDropIns opens their listeners, for models that there are.
func openDropIns(services []dropIn, bbr bool, models *engine.Registry, log *slog.Logger) (all []server.Service, err error) {
	for _, d := range services {
		var l net.Listener
		switch {
		case err != nil:
			continue
		case d.model == "":
			err = fail.Usage("--%s %s names no model that its clients call; use --%[1]s %[2]s,model=NAME", d.flag, d.address)
		case !slices.ContainsFunc(models.Infos(), func(i engine.Info) bool { return i.Name == d.model }):
			err = fail.Usage("--%s %s,model=%s: no such model; add it with --model or --python", d.flag, d.address, d.model)
		default:
			l, err = listen(d.flag, d.address, bbr)
		}
		if err == nil {
			all = append(all, d.service(l))
			log.Info("listening for clients of another system", slog.String("system", d.system), slog.String("address", addressOf(l)), slog.String("model", d.model))
		}
	}
	if err != nil {
		for _, svc := range all {
			_ = svc.Listener.Close()
		}
	}
	return all, err
}

// OnHangup is what SIGHUP does instead of stopping the process: in a server without a terminal,
// which cannot hang up.
var OnHangup atomic.Pointer[func()]

// hasTerminal reports whether a terminal controls this process.
func hasTerminal() bool {
	f, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	_ = f.Close() // of none is an error
	return err == nil
}

// Run runs a server until ctx ends. Once it listens, it writes its address to ready.
func Run(ctx context.Context, c Config, ready io.Writer) (err error) {
	log, lines := newLog(c)
	defer lines.flush()
	id, err := c.identity(log)
	if err == nil {
		err = errors.Join(c.checkExposed("listen", c.listen, id), c.checkExposed("metrics", c.metrics, id))
	}
	services, bad := c.dropIns()
	for _, d := range services {
		bad = errors.Join(bad, c.checkExposed(d.flag, d.address, id))
	}
	if err = errors.Join(err, bad); err != nil {
		return err
	}
	for _, f := range c.Former {
		log.Warn("this setting applies in this version and will go", slog.String("setting", f.Name), slog.String("write_instead", f.Usage))
	}
	may, err := c.readRoles(id, log)
	if err != nil {
		return err
	}
	if len(c.Services) > 0 {
		log.Debug("variables of a Kubernetes Service are ignored", slog.Any("variables", c.Services))
	}
	if !hasTerminal() {
		OnHangup.Store(new(func() {
			log.Info("hangup: certificates, keys, tokens and roles are read again")
			if id != nil {
				id.Reread()
			}
			if may != nil {
				may.reread()
			}
		}))
	}
	memory, from, unseen := memoryLimit(memlimit.FromCgroup, memlimit.FromSystem)
	log.Info("starting", slog.String("version", Version), slog.Int("pid", os.Getpid()), slog.String("memory", display.Size(memory)), slog.String("memory_from", from))
	if unseen != nil && from != "GOMEMLIMIT" {
		log.Warn("the memory limit of this container, if it has one, cannot be seen: set --memory and GOMEMLIMIT", slog.String("reason", unseen.Error()))
	}
	e, err := newEngines(c.Engines, log)
	if err != nil {
		return err
	}
	defer e.Close()
	pushed, err := c.store.open(e.host, log)
	if err != nil {
		return err
	}
	tensors, err := withFiles(pushed, c.files, log)
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
	if most := ConnectionsOf(proc.MostDescriptors()); cfg.Connections > most {
		log.Warn("--max-connections is more than the descriptors allow: raise the hard limit (ulimit -Hn, LimitNOFILE)", slog.Int("set", cfg.Connections), slog.Int("used", most))
		cfg.Connections = most
	}
	cfg.Version, cfg.Models, cfg.Pool, cfg.Budget = Version, e.models, e.host.Pool(), e.host.Budget()
	cfg.Store, cfg.Sources, cfg.Log, cfg.Metrics, cfg.Lanes = tensors, sources, log, registry, cmp.Or(c.lanes, -1)
	if id != nil {
		cfg.Credentials, cfg.Identify = id.Credentials(), id.Principal
	}
	if may != nil {
		may.stored, cfg.Authorize = tensors, may.authorize
	}
	if cfg.Services, err = openDropIns(services, c.bbr, e.models, log); err != nil {
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
	at, unwatch, bad := serveHTTP("metrics", c.metrics, id, metrics.Handler(registry, serving, c.pprof), watching, log)
	defer unwatch()
	probes, unprobe, err := serveHTTP("health-listen", c.health, nil, metrics.Probes(serving, s.Health()), watching, log)
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
	addresses := append([]string{c.listen, c.metrics}, display.Each(services, func(d dropIn) string { return d.address })...)
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
		defer func() {
			err = errors.Join(fail.Exit(fail.ExitDevice, "a device was lost; its error is in the log, and a new process can use it again"), err)
		}()
	}
	draining.Store(true)
	log.Info("draining", slog.Float64("at_most_seconds", c.drain.Seconds()))
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.drain)
	defer cancel()
	if err := s.Shutdown(drain); err != nil {
		log.Warn("stopped", slog.Bool("drained", false))
		return errors.Join(fail.Exit(fail.ExitFailure, "calls that were still open were cancelled after %s", settings.ShortDuration(c.drain)), <-served)
	}
	log.Info("stopped", slog.Bool("drained", true))
	return <-served
}

// ConnectionsOf returns how many connections so many descriptors allow, beside what else needs some.
func ConnectionsOf(descriptors int) int {
	return descriptors - max(descriptors/4, min(keptDescriptors, descriptors/2))
}

// serveHTTP serves h on the address of a flag, unless that is off, until stop; failed receives an
// end before. What other machines reach is secured by id, if there is one.
func serveHTTP(flag, address string, id *identity.Server, h http.Handler, failed chan<- error, log *slog.Logger) (at string, stop func(), err error) {
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

// listen opens the listener of a flag, whose connections send by BBR if bbr.
func listen(flag, address string, bbr bool) (l net.Listener, err error) {
	var how net.ListenConfig
	if bbr {
		how.Control = lane.BBR
	}
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		path = strings.TrimPrefix(path, "//")
		l, err = net.Listen("unix", path)
		if errors.Is(err, syscall.EADDRINUSE) && removeStaleSocket(path) {
			l, err = net.Listen("unix", path)
		}
	} else if _, _, err = net.SplitHostPort(address); err == nil {
		l, err = how.Listen(context.Background(), "tcp", address)
	}
	if err == nil {
		return l, nil
	}
	if bad, ok := errors.AsType[*net.AddrError](err); ok {
		return nil, fail.Usage("--%s %q is not an address: %s; use host:port or unix:/path", flag, address, bad.Err)
	}
	hint := "choose another address with --" + flag
	if flag == "metrics" {
		hint += ", or turn it off with --metrics off"
	}
	return nil, fail.Lasting(fail.Hinted(fmt.Errorf("--%s %s: %w", flag, address, err), hint))
}

// exposed reports whether other machines can reach an address.
func exposed(address string) bool {
	host, _, err := net.SplitHostPort(address)
	ip := net.ParseIP(host)
	return err == nil && !strings.HasPrefix(address, "unix:") && host != "localhost" && (ip == nil || !ip.IsLoopback())
}

// removeStaleSocket removes a socket on which nothing listens, and no other file, if it can.
func removeStaleSocket(path string) bool {
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

// Version ends in -dev between releases.
const Version = "0.1.0-dev"
