package splitlearn

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/procfs"
	"google.golang.org/grpc"

	pb "github.com/tensorferry/tensorferry/api/splitlearn/comm"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/server"
)

// monitor looks at the machine and the process, as far as the system tells.
type monitor struct {
	look sync.Mutex // guards all below
	last *pb.MonitoringSnapshot
	at   time.Time
	cpu  procfs.CPUStat // seconds of all CPUs, at that time
}

// snapshot returns what is used now, or was a moment ago. It is shared, read-only.
func (m *monitor) snapshot(models *server.Models) *pb.MonitoringSnapshot {
	m.look.Lock()
	defer m.look.Unlock()
	now := time.Now()
	if m.last != nil && now.Sub(m.at) < sampleEvery {
		return m.last
	}
	m.at, m.last = now, &pb.MonitoringSnapshot{
		Timestamp:    float64(now.UnixMicro()) / 1e6,
		GpuAvailable: slices.ContainsFunc(models.Infos(), func(i engine.Info) bool { return strings.HasPrefix(i.Device, "cuda") }),
	}
	system, err := procfs.NewDefaultFS()
	if err != nil {
		return m.last
	}
	if stat, err := system.Stat(); err == nil {
		cpu, was := stat.CPUTotal, m.cpu
		busy := cpu.User + cpu.Nice + cpu.System + cpu.IRQ + cpu.SoftIRQ + cpu.Steal - (was.User + was.Nice + was.System + was.IRQ + was.SoftIRQ + was.Steal)
		idle := cpu.Idle + cpu.Iowait - (was.Idle + was.Iowait)
		m.last.CpuPercent, m.cpu = float32(100*busy/max(1e-9, busy+idle)), cpu
	}
	if r, err := proc.ResidentOf(os.Getpid()); err == nil {
		m.last.MemoryMb = float32(r.Own+r.Mapped) / (1 << 20)
		if all, err := system.Meminfo(); err == nil && all.MemTotalBytes != nil {
			m.last.MemoryPercent = 100 * float32(r.Own+r.Mapped) / float32(*all.MemTotalBytes)
		}
	}
	return m.last
}

// StreamMonitoring sends a snapshot each second, or as often as the client likes within the bounds
// of theirs, until it cancels.
func (s *service) StreamMonitoring(req *pb.MonitoringStreamRequest, to grpc.ServerStreamingServer[pb.MonitoringSnapshotResponse]) error {
	seconds := 1.0
	if asked := req.GetSamplingInterval(); asked > 0 { // and a number
		seconds = min(max(asked, 0.1), 5)
	}
	tick := time.NewTicker(time.Duration(seconds * float64(time.Second)))
	defer tick.Stop()
	for {
		if err := to.Send(&pb.MonitoringSnapshotResponse{Snapshot: s.snapshot(s.models)}); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-to.Context().Done():
			return context.Cause(to.Context())
		case <-s.models.Context().Done():
			return context.Cause(s.models.Context())
		}
	}
}
