package serve

import (
	"math"
	"time"

	"github.com/spf13/pflag"

	"github.com/tensorferry/tensorferry/compat/kpu"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/terms"
)

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
