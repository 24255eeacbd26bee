package testkit

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
)

// recorder stands in for a test, to see how a check fails.
type recorder struct {
	testing.TB
	failed   bool
	text     string
	cleanups []func()
}

func (r *recorder) Helper()                           {}
func (r *recorder) Failed() bool                      { return r.failed }
func (r *recorder) Cleanup(f func())                  { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Error(args ...any)                 { r.failed, r.text = true, r.text+fmt.Sprint(args...) }
func (r *recorder) Errorf(format string, args ...any) { r.Error(fmt.Sprintf(format, args...)) }
func (r *recorder) Logf(format string, args ...any)   { r.text += fmt.Sprintf(format, args...) }

// end runs the cleanups as the end of a test does. In a bubble, patience costs nothing.
func (r *recorder) end() {
	for _, cleanup := range slices.Backward(r.cleanups) {
		cleanup()
	}
}

func TestStartNamesTheGoroutineThatWasLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &recorder{TB: t}
		Start(r)
		stop := make(chan struct{})
		go leftBehind(stop)
		r.end()
		if !r.failed || !strings.Contains(r.text, "leftBehind") {
			t.Errorf("the leak was not reported: %q", r.text)
		}
		close(stop)
	})
}

func leftBehind(stop chan struct{}) { <-stop }

func TestStartAcceptsWhatRanBeforeAndWhatIsAboutToEnd(t *testing.T) {
	stop, done := make(chan struct{}), make(chan struct{})
	go leftBehind(stop)
	defer close(stop)
	r := &recorder{TB: t}
	Start(r)
	go func() { close(done) }()
	r.end()
	<-done
	if r.failed {
		t.Errorf("no goroutine was left behind, but: %s", r.text)
	}
}

func TestStartAcceptsAgRPCServerAndClientThatWereClosed(t *testing.T) {
	Start(t)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(s, health.NewServer())
	served := make(chan error, 1)
	go func() { served <- s.Serve(lis) }()
	conn, err := grpc.NewClient("passthrough:///"+lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := grpc_health_v1.NewHealthClient(conn).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	if err := <-served; err != nil {
		t.Fatal(err)
	}
}

func TestPoolReportsASlabThatWasNeverReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &recorder{TB: t}
		s, err := Pool(r).Get(100)
		if err != nil {
			t.Fatal(err)
		}
		r.end()
		if !r.failed || !strings.Contains(r.text, "1 slabs of 4096 bytes") {
			t.Errorf("the leak was not reported: %q", r.text)
		}
		s.Release()
	})
}

func TestPoolWaitsForASlabThatIsReleasedLate(t *testing.T) {
	p := Pool(t)
	s, err := p.Get(100)
	if err != nil {
		t.Fatal(err)
	}
	go s.Release()
}

func TestEventuallyReturnsOnceTheConditionHolds(t *testing.T) {
	tries := 0
	Eventually(t, func() bool { tries++; return tries == 3 }, "the third try")
	if tries != 3 {
		t.Errorf("tried %d times, want 3", tries)
	}
}

func TestPollGivesUpAfterItsPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if poll(func() bool { return false }) {
			t.Error("a condition that never holds was taken as held")
		}
	})
}

func TestRandRepeatsItselfFromTheSeedItLogs(t *testing.T) {
	r := &recorder{TB: t, failed: true}
	first := Rand(r).Uint64()
	r.end()
	_, seed, found := strings.Cut(r.text, seedVariable+"=")
	if !found {
		t.Fatalf("no seed in %q", r.text)
	}
	t.Setenv(seedVariable, seed)
	if got := Rand(t).Uint64(); got != first {
		t.Errorf("the seed gave %d, want %d", got, first)
	}
}

func TestBytesAreTheSameOnEveryMachine(t *testing.T) {
	whole := Bytes(1000, 7)
	if got, want := crc32.ChecksumIEEE(whole), uint32(0x2cfcc7da); got != want {
		t.Errorf("checksum %#x, want %#x", got, want)
	}
	for _, n := range []int{0, 1, 7, 8, 9, 999} {
		if b := Bytes(n, 7); len(b) != n || !bytes.Equal(b, whole[:n]) {
			t.Errorf("%d bytes are no prefix of more of them", n)
		}
	}
	if bytes.Equal(Bytes(16, 7), Bytes(16, 8)) {
		t.Error("two seeds gave the same bytes")
	}
}

func TestANetworkInMemoryLetsTimePassForWhoWaitsForAPeer(t *testing.T) {
	Start(t)
	synctest.Test(t, func(t *testing.T) {
		var n Network
		l := n.Listen()
		accepted := make(chan net.Conn, 1)
		go func() { // ends with the first connection
			c, err := l.Accept()
			if err != nil {
				t.Error(err)
			}
			accepted <- c
		}()
		c, err := n.Dial(t.Context(), "tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		peer := <-accepted
		if c.RemoteAddr().String() != l.Addr().String() {
			t.Errorf("connected to %v, want %v", c.RemoteAddr(), l.Addr())
		}
		if err := c.SetReadDeadline(time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if _, err := c.Read(make([]byte, 1)); err == nil || time.Since(begin) < time.Hour {
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
		if _, err := peer.Write([]byte{7}); err != nil {
			t.Fatal(err)
		}
		if err := c.SetReadDeadline(time.Time{}); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1)
		if _, err := c.Read(b); err != nil || b[0] != 7 {
			t.Errorf("read %v: %v", b, err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := n.Dial(t.Context(), "tcp", l.Addr().String()); err == nil {
			t.Error("a listener that is closed was reached")
		}
	})
}
