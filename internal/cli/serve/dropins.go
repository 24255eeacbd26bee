package serve

import (
	"errors"
	"log/slog"
	"net"
	"slices"

	"github.com/spf13/pflag"

	"github.com/tensorferry/tensorferry/compat/splitlearn"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
	"github.com/tensorferry/tensorferry/server"
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
