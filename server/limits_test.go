package server_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/attack"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store/storetest"
	"github.com/tensorferry/tensorferry/stream"
)

// shownBy names, for every limit of GetServiceInfo, the tests of this package, or of those
// below, that reach it and go one past it.
var shownBy = map[string][]string{
	"chunk_bytes":              {"TestLimitsOfADescAreReachedAndNotPassed", "TestABadTensorOfAPushFailsAloneAndSaysWhy"},
	"chunks_per_tensor":        {"TestLimitsOfADescAreReachedAndNotPassed", "TestABadTensorOfAPushFailsAloneAndSaysWhy"},
	"message_bytes":            {"TestAMessageOfTheLimitArrivesAndALargerOneDoesNot"},
	"window_bytes":             {"TestTheServersSettingsTellItsLimits"},
	"tensor_bytes":             {"TestLimitsOfADescAreReachedAndNotPassed"},
	"rank":                     {"TestLimitsOfADescAreReachedAndNotPassed"},
	"dimension":                {"TestLimitsOfADescAreReachedAndNotPassed"},
	"allowance_bytes":          {"TestLimitsOfADescAreReachedAndNotPassed"},
	"allowance_chunks":         {"TestLimitsOfADescAreReachedAndNotPassed"},
	"open_calls_per_session":   {"TestCallsAndTensorsOverASessionsLimitsAreRefusedAlone"},
	"open_tensors_per_session": {"TestCallsAndTensorsOverASessionsLimitsAreRefusedAlone"},
	"lanes_per_session":        {"TestALaneWithoutAValidTokenIsRefused"},
	"sessions":                 {"TestLimitsOfTheServerAreNamedWhenTheyAreReached"},
	"calls":                    {"TestLimitsOfTheServerAreNamedWhenTheyAreReached", "TestOneComputeOverTheCallsOfTheServerIsRefusedAsLater"},
	"sequences":                {"TestOneSequenceOverTheLimitIsRefusedAsLater"},
	"transfers":                {"TestTransfersOverTheLimitAreRefusedAsLater"},
	"stored_tensor_bytes":      {"TestLimitsOfAPushAreReachedAndNotPassed"},
	"tensors_per_transfer":     {"TestLimitsOfAPushAreReachedAndNotPassed", "TestABadPullIsRefusedBeforeAnythingIsSent", "TestABadRequestAboutTheStoreIsRefusedAndSaysWhy"},
	"open_tensors_per_push":    {"TestLimitsOfAPushAreReachedAndNotPassed"},
	"compute_bytes":            {"TestComputeTakesAndGivesAMiBAndNoMore"},
	"request_parts":            {"TestARequestOfManyPartsIsRefusedBeforeTheyAreMade"},
	"tensors_per_page":         {"TestAListComesInPagesOfTheLimit"},
	"memory_bytes":             {"TestACallThatCanNeverFitIsRefusedNamingTheLimit", "TestTooManyChunksForTheBudgetAreRefusedNamingIt"},
	"receive_bytes":            {"TestUnfinishedMessagesAreChargedAndEndForOthers", "TestAnRPCForWhichThereIsNoMemoryIsRefused"},
	"memory_wait_millis":       {"TestACallWaitsForMemoryABoundedTime"},
	"first_frame_millis":       {"TestABrokenRuleOfTheSessionEndsItWithTheRightStatus"},
	"chunk_idle_millis":        {"TestACallWhoseInputsDoNotComeExpires", "TestAPullThatNobodyReadsEndsAndGivesEverythingBack"},
	"input_idle_millis":        {"TestASessionThatOnlySaysThatItWaitsEndsWithTheBound", "TestAPushWhoseClientSaysThatItWaitsIsWaitedForToTheBound"},
	"session_idle_millis":      {"TestAnIdleSessionEnds"},
	"name_bytes":               {"TestLimitsOfADescAreReachedAndNotPassed", "TestABrokenRuleOfACallFailsThatCallAloneWithTheRightCode", "TestABadTensorOfAPushFailsAloneAndSaysWhy"},
	"entries":                  {"TestLimitsOfADescAreReachedAndNotPassed", "TestABrokenRuleOfACallFailsThatCallAloneWithTheRightCode", "TestABadTensorOfAPushFailsAloneAndSaysWhy"},
	"entry_key_bytes":          {"TestLimitsOfADescAreReachedAndNotPassed", "TestABrokenRuleOfACallFailsThatCallAloneWithTheRightCode", "TestABadTensorOfAPushFailsAloneAndSaysWhy"},
	"entry_value_bytes":        {"TestLimitsOfADescAreReachedAndNotPassed", "TestABrokenRuleOfACallFailsThatCallAloneWithTheRightCode", "TestABadTensorOfAPushFailsAloneAndSaysWhy"},
	"entries_bytes":            {"TestLimitsOfADescAreReachedAndNotPassed", "TestABrokenRuleOfACallFailsThatCallAloneWithTheRightCode", "TestABadTensorOfAPushFailsAloneAndSaysWhy"},
	"connections":              {"TestOneConnectionTooManyIsToldSoAndTheOthersAreServed"},
	"thin_frames_per_second":   {"TestThinFramesComeAtTheRateOfTheirConnection"},
	"streams_per_connection":   {"TestLimitsOfAConnectionAreThoseOfTheConfig", "TestTheServersSettingsTellItsLimits"},
	"header_list_bytes":        {"TestLimitsOfAConnectionAreThoseOfTheConfig", "TestTheServersSettingsTellItsLimits"},
	"handshake_millis":         {"TestAConnectionThatDoesNotShakeHandsIsClosed"},
	"keepalive_millis":         {"TestAPeerThatDoesNotAnswerAPingIsDisconnected"},
	"keepalive_timeout_millis": {"TestAPeerThatDoesNotAnswerAPingIsDisconnected"},
	"keepalive_min_millis":     {"TestAPeerThatPingsTooOftenIsDisconnected"},
}

func TestEveryLimitOfAServerHasATestThatReachesIt(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	info, err := f.server.GetServiceInfo(t.Context(), nil)
	require.NoError(t, err)
	have := map[string]bool{}
	files, err := filepath.Glob("*_test.go")
	require.NoError(t, err)
	for _, below := range []string{"conns", "serving"} {
		more, err := filepath.Glob("../internal/" + below + "/*_test.go")
		require.NoError(t, err)
		files = append(files, more...)
	}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, d := range file.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				have[fn.Name.Name] = true
			}
		}
	}
	for limit := range info.GetLimits() {
		require.NotEmpty(t, shownBy[limit], "limit %q: name the test that reaches it and goes one past it", limit)
	}
	for limit, tests := range shownBy {
		require.Contains(t, info.GetLimits(), limit, "there is no such limit any more")
		for _, test := range tests {
			require.True(t, have[test], "limit %q: there is no %s", limit, test)
		}
	}
}

func TestLimitsOfADescAreReachedAndNotPassed(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) {
		unpaced(c)
		c.Session.TensorBytes = 64 * mib
	})
	g := addGate(t, f, "gate") // never opened: what is too large to send is announced, credited and cancelled
	const invalid, exhausted = codes.InvalidArgument, codes.ResourceExhausted
	size := func(o *offer, n int64, chunk uint32) {
		o.desc.Shape, o.desc.SizeBytes, o.desc.ChunkBytes = []int64{n}, uint64(n), chunk
	}
	for name, tc := range map[string]struct {
		over   func(o *offer, by int) // what passes the limit by so much, or reaches it by 0
		model  string                 // a call at the limit computes; empty: it is only credited
		code   codes.Code
		unless []string // the text past it
	}{
		"chunk_bytes": {func(o *offer, by int) { o.data = make([]byte, mib+by); size(o, int64(mib+by), uint32(mib+by)) }, "echo", invalid, []string{"1048577", "1048576"}},
		"allowance_bytes": {func(o *offer, by int) {
			o.data = make([]byte, mib+by)
			size(o, int64(mib+by), mib)
			o.desc.OnAllowance = true
		}, "echo", exhausted, []string{"allowance", "1048577"}},
		"allowance_chunks": {func(o *offer, by int) {
			o.data = make([]byte, 4096+by)
			size(o, int64(4096+by), 1)
			o.desc.OnAllowance = true
		}, "echo", exhausted, []string{"4097", "4096"}},
		"chunks_per_tensor": {func(o *offer, by int) { size(o, int64(1<<20+by), 1) }, "", exhausted, []string{"1048577 chunks", "1048576"}},
		"tensor_bytes":      {func(o *offer, by int) { size(o, int64(64*mib+by), mib) }, "", exhausted, []string{"67108865", "67108864"}},
		"rank": {func(o *offer, by int) {
			o.desc.Shape = slices.Repeat([]int64{1}, 32+by)
			o.data = o.data[:1]
			o.desc.SizeBytes = 1
		}, "echo", invalid, []string{"rank 33", "32"}},
		"dimension": {func(o *offer, by int) {
			o.desc.Shape = []int64{0, 1<<40 + int64(by)}
			o.data = nil
			o.desc.SizeBytes = 0
		}, "echo", invalid, []string{"1099511627777", "1099511627776"}},
		"name_bytes":        {func(o *offer, by int) { o.desc.Name = strings.Repeat("n", 512+by) }, "echo", invalid, []string{"name", "512"}},
		"entries":           {func(o *offer, by int) { o.desc.Metadata = entriesOf(64+by, 3, 1) }, "echo", invalid, []string{"65", "64"}},
		"entry_key_bytes":   {func(o *offer, by int) { o.desc.Metadata = entriesOf(1, 128+by, 1) }, "echo", invalid, []string{"129", "128"}},
		"entry_value_bytes": {func(o *offer, by int) { o.desc.Metadata = entriesOf(1, 1, 4096+by) }, "echo", invalid, []string{"4097", "4096"}},
		"entries_bytes": {func(o *offer, by int) {
			o.desc.Metadata = entriesOf(8, 8, 4088)
			o.desc.Metadata["00000007"] += strings.Repeat("v", by)
		}, "echo", invalid, []string{"32768"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := openRaw(t, f.addr)
			o := small("echo")
			o.desc.OnAllowance = false
			tc.over(o, 1)
			r.open(o)
			done := r.done(o.call.Id)
			require.Equal(t, tc.code, codes.Code(done.Code), done.Message)
			saysWhy(t, done.Message, tc.unless)

			o = small("echo")
			o.desc.OnAllowance = false
			if tc.over(o, 0); tc.model != "" {
				require.Equal(t, string(o.data), string(r.run(o)["y"].data))
				return
			}
			o.call.Model = "gate"
			r.open(o)
			r.credit(o.desc.TensorId, 1)
			r.send(&pb.Frame{Cancels: []*pb.Cancel{{CallId: o.call.Id}}})
			require.Equal(t, codes.Canceled, codes.Code(r.done(o.call.Id).Code))
			require.Zero(t, g.started.Load())
			r.good()
		})
	}
}

// filled is a frame of exactly so many bytes, a MiB of which are a chunk's.
func filled(t testing.TB, o *parcel, bytes int) *pb.Frame {
	t.Helper()
	d := ten("pad").desc
	d.Metadata = map[string]string{}
	f := &pb.Frame{Descs: []*pb.TensorDesc{d}, Chunk: o.chunk(0)}
	for i := 0; proto.Size(f) < bytes; i++ {
		key := fmt.Sprint(i)
		d.Metadata[key] = "" // as long as it takes: what a desc may have is not the question
		d.Metadata[key] = strings.Repeat("v", max(0, min(4<<10, bytes-proto.Size(f)-8)))
		if left := bytes - proto.Size(f); left < 16 {
			d.Metadata[key] += strings.Repeat("v", left)
		}
	}
	require.Equal(t, bytes, proto.Size(f))
	return f
}

func TestAMessageOfTheLimitArrivesAndALargerOneDoesNot(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 16*mib)
	f := serve(t, func(c *server.Config) { c.Store = m })
	const limit = mib + 64<<10
	p := openPush(t, f)
	o := pack("x", testkit.Bytes(mib, 1), mib)
	p.announce(o)
	p.send(filled(t, o, limit))
	p.stored(o) // that the desc beside it has too much metadata is the desc's affair

	p = openPush(t, f)
	o = pack("y", testkit.Bytes(mib, 1), mib)
	p.announce(o)
	p.send(filled(t, o, limit+1))
	st := p.finish()
	require.Equal(t, codes.ResourceExhausted, st.Code())
	saysWhy(t, st.Message(), []string{fmt.Sprint(limit + 1), fmt.Sprint(limit)})
	require.Equal(t, []string{"x"}, storetest.Names(t, m))
}

func TestLimitsOfAPushAreReachedAndNotPassed(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 64*mib)
	f := serve(t, func(c *server.Config) { c.Store, c.StoredBytes = m, 2*mib })
	t.Run("bytes of a tensor", func(t *testing.T) {
		for by := range 2 {
			p := openPush(t, f)
			o := pack(fmt.Sprint("bytes", by), make([]byte, 2*mib+by), mib)
			p.announce(o)
			p.deliver(o, 0)
			if by == 0 {
				p.stored(o)
				continue
			}
			s := p.summary(o)
			require.Equal(t, codes.ResourceExhausted, codes.Code(s.GetCode()))
			saysWhy(t, s.GetMessage(), []string{"2097153", "2097152"})
		}
	})
	t.Run("name, metadata and chunks", func(t *testing.T) {
		p := openPush(t, f)
		o := pack(strings.Repeat("n", 512), make([]byte, 2*mib), mib)
		o.desc.Metadata = entriesOf(8, 8, 4088)
		p.announce(o)
		p.deliver(o, 0)
		p.stored(o)
		// 2^20 chunks: announced, and what is kept of them taken from the budget.
		p = openPush(t, f)
		o = pack("chunks", make([]byte, mib), 1)
		p.announce(o)
		testkit.Eventually(t, func() bool { used, _, _ := f.host.Budget().Used(); return used > mib }, "the budget of so many chunks")
		p.chunk(o.chunk(1<<20 - 1))
		s := p.summary(o)
		saysWhy(t, s.GetMessage(), []string{"ended after 1 of 1048576 bytes"})
		f.isEmpty(t)
	})
	t.Run("open tensors", func(t *testing.T) {
		p := openPush(t, f)
		var open []*parcel
		for i := range 16 {
			open = append(open, ten(fmt.Sprint("open", i)))
		}
		over := ten("over")
		p.announce(open...)
		p.announce(over)
		for _, o := range open {
			p.deliver(o, 0)
		}
		s := p.summary(over)
		require.Equal(t, codes.ResourceExhausted, codes.Code(s.GetCode()))
		saysWhy(t, s.GetMessage(), []string{"open tensors", "16"})
		for _, o := range open {
			p.stored(o)
		}
	})
	t.Run("tensors", func(t *testing.T) {
		for by := range 2 {
			p := openPush(t, f)
			var all []*parcel
			for i := range 1024 + by {
				o := pack(fmt.Sprint("many", i), []byte{1}, 1)
				if i%100 == 0 {
					o.data, o.desc.Shape, o.desc.SizeBytes = nil, []int64{0}, 0
				}
				p.send(&pb.Frame{Descs: []*pb.TensorDesc{o.desc}, Chunk: o.chunk(0)})
				all = append(all, o)
			}
			if by > 0 {
				st := p.finish()
				require.Equal(t, codes.ResourceExhausted, st.Code())
				saysWhy(t, st.Message(), []string{"tensors", "1024", "several"})
				continue
			}
			require.NoError(t, p.finish().Err())
			require.Len(t, p.resp.GetSummaries(), 1024)
			require.Less(t, proto.Size(p.resp), 4*mib, "a stock client takes no more")
			for _, o := range all[1020:] {
				p.stored(o)
			}
			require.Len(t, f.transfer(t, p.id).GetTensors(), 1024)
		}
	})
	t.Run("tables", func(t *testing.T) {
		tight := serveWithin(t, 4*mib, func(c *server.Config) { c.Store = m })
		p := openPush(t, tight)
		o := pack("table", make([]byte, mib), 1)
		p.announce(o)
		s := p.summary(o)
		require.Equal(t, codes.ResourceExhausted, codes.Code(s.GetCode()))
		saysWhy(t, s.GetMessage(), []string{"budget", "larger chunks", fmt.Sprint(4 * mib)})
		tight.isEmpty(t)
	})
}

func TestRefusedTensorsOfAPushStayFewBytes(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		m := shelf(t, mib)
		f := serve(t, func(c *server.Config) { c.Store = m })
		p := openPush(t, f)
		open := ten("open")
		p.announce(open)
		for range 1023 {
			o := ten(strings.Repeat("\u2028", 10<<10)) // of 30 KiB, and longer when quoted
			p.send(&pb.Frame{Descs: []*pb.TensorDesc{o.desc}})
		}
		p.deliver(open, 0)
		p.stored(open)
		require.Less(t, proto.Size(p.resp), mib)
		require.Less(t, proto.Size(f.transfer(t, p.id)), mib)
	})
}

func TestTransfersOverTheLimitAreRefusedAsLater(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, mib)
	storetest.Put(t, m, "x", []byte("abc"))
	f := serve(t, func(c *server.Config) { c.Store, c.Transfers = m, 6 })
	stub := pb.NewTensorServiceClient(f.dial(t))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 5 { // one place is for others. They need not say hello
		_, err := stub.PushTensors(ctx)
		require.NoError(t, err)
	}
	testkit.Eventually(t, func() bool { return f.counters(t)["open_transfers"] == 5 }, "all")
	push, err := stub.PushTensors(ctx)
	require.NoError(t, err)
	pull, err := stub.PullTensors(ctx, &pb.PullTensorsRequest{Hello: greeting(newID()), Selections: []*pb.Selection{{Name: "x"}}})
	require.NoError(t, err)
	for _, s := range []grpc.ClientStream{push, pull} {
		st := status.Convert(s.RecvMsg(new(pb.Frame)))
		require.Equal(t, codes.ResourceExhausted, st.Code())
		saysWhy(t, st.Message(), []string{"open transfers", "limit of the server is 6"})
		require.True(t, tellsWhenToRetry(st))
	}
	cancel()
	testkit.Eventually(t, func() bool { return f.counters(t)["open_transfers"] == 0 }, "their end")
	require.Zero(t, pullAll(t, f, &pb.Selection{Name: "x"}).summary(t, "x").GetCode())
}

func TestAStoreThatIsFullSaysSoAndTakesMoreLater(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 2*mib)
	f := serve(t, func(c *server.Config) { c.Store = m })
	first, second := openPush(t, f), openPush(t, f)
	a, b := pack("a", make([]byte, 2*mib), mib), pack("b", make([]byte, 4096), mib)
	first.announce(a)
	testkit.Eventually(t, func() bool { used, _ := m.Used(); return used == 2*mib }, "room for a")
	second.announce(b)
	s := second.summary(b)
	require.Equal(t, codes.ResourceExhausted, codes.Code(s.GetCode()))
	saysWhy(t, s.GetMessage(), []string{"the store is full", "needs 4096 bytes more than the 0 that are free", "try again"})
	require.Positive(t, s.GetRetryAfterMillis())
	first.deliver(a, 0)
	first.stored(a)
	_, err := m.Delete(t.Context(), "a")
	require.NoError(t, err)
	second = openPush(t, f)
	second.announce(b)
	second.deliver(b, 0)
	second.stored(b)
	require.Equal(t, []string{"b"}, storetest.Names(t, m))
}

// asking is a small call of one input.
func asking(model string, d pb.DataType, data []byte, shape ...int64) *pb.ComputeRequest {
	return &pb.ComputeRequest{Model: model, Inputs: []*pb.NamedTensor{{Port: "x", Dtype: d, Shape: shape, Data: data}}}
}

func TestComputeTakesAndGivesAMiBAndNoMore(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	stub := pb.NewTensorServiceClient(f.dial(t))
	data := testkit.Bytes(mib+1, 1)
	resp, err := stub.Compute(t.Context(), asking("echo", pb.DataType_DATA_TYPE_UINT8, data[:mib], mib))
	require.NoError(t, err)
	require.True(t, bytes.Equal(data[:mib], resp.GetOutputs()[0].GetData()))
	_, err = stub.Compute(t.Context(), asking("echo", pb.DataType_DATA_TYPE_UINT8, data, mib+1))
	require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
	saysWhy(t, status.Convert(err).Message(), []string{"the inputs", "1048576", "session"})
	for range 20 { // gRPC, which has words of its own for it, never comes first
		_, err := stub.Compute(t.Context(), asking("echo", pb.DataType_DATA_TYPE_UINT8, make([]byte, 2*mib), 2*mib))
		require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
		saysWhy(t, status.Convert(err).Message(), []string{"message of 2097", "1114112", "StreamTensors"})
	}
	f.isEmpty(t)
}

// TestABadComputeIsRefusedAndSaysWhy has what a message may hold and a tensor not, and one
// of each status; internal/serving has the rest.
func TestABadComputeIsRefusedAndSaysWhy(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	g := addGate(t, f, "gate")
	g.open = nil // for ever
	f.add(t, cpu.RowFunc{
		Info: engine.Info{Name: "broken", Rows: 1, Inputs: anyShape("x"), Outputs: anyShape("y")},
		Rows: func(context.Context, cpu.RowBlock) error { return errors.New("open /home/secret: permission denied") },
	})
	u8 := pb.DataType_DATA_TYPE_UINT8
	ask := func(change func(r *pb.ComputeRequest)) *pb.ComputeRequest {
		r := asking("echo", u8, []byte("abc"), 3)
		change(r)
		return r
	}
	const invalid = codes.InvalidArgument
	stub := pb.NewTensorServiceClient(f.dial(t))
	for name, tc := range map[string]struct {
		req  *pb.ComputeRequest
		code codes.Code
		says []string
	}{
		"an unknown model":       {asking("nothing", u8, nil, 0), codes.NotFound, []string{`"nothing"`}},
		"a model of 500 KiB":     {asking(strings.Repeat("\x01", 500<<10), u8, nil, 0), invalid, []string{"model", "512"}},
		"a port of 500 KiB":      {ask(func(r *pb.ComputeRequest) { r.Inputs[0].Port = strings.Repeat("q", 500<<10) }), invalid, []string{`"x"`}},
		"no data type":           {asking("echo", 0, []byte("abc"), 3), invalid, []string{"data type"}},
		"an unknown data type":   {asking("echo", 99, []byte("abc"), 3), invalid, []string{"data type", "99"}},
		"a negative data type":   {asking("echo", -1, []byte("abc"), 3), invalid, []string{"data type"}},
		"a data type past 2^8":   {asking("echo", 1<<8+6, []byte("abc"), 3), invalid, []string{"data type"}},
		"rank 100 000":           {asking("echo", u8, nil, make([]int64, 100_000)...), invalid, []string{"rank 100000", "32"}},
		"a shape that overflows": {asking("echo", u8, nil, 1<<40, 1<<40), codes.ResourceExhausted, []string{"2^63"}},
		"65 params":              {ask(func(r *pb.ComputeRequest) { r.Params = entriesOf(65, 3, 1) }), invalid, []string{"params", "65", "64"}},
		"a type not taken":       {asking("relu", u8, []byte("abc"), 3), codes.FailedPrecondition, []string{"float32", "uint8[3]", `"x"`}},
		"a model that fails":     {ask(func(r *pb.ComputeRequest) { r.Model = "broken" }), codes.Internal, []string{"model failed", "call's id"}},
		"a timeout":              {ask(func(r *pb.ComputeRequest) { r.Model, r.TimeoutMillis = "gate", 20 }), codes.DeadlineExceeded, []string{"timeout"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := stub.Compute(t.Context(), tc.req)
			st := status.Convert(err)
			require.Equal(t, tc.code, st.Code(), st.Message())
			saysWhy(t, st.Message(), tc.says)
			testkit.Eventually(t, func() bool { return f.counters(t)["calls"] == 0 }, "the call's end")
			_, err = stub.Compute(t.Context(), asking("echo", u8, []byte("abc"), 3))
			require.NoError(t, err, "a good call after it")
			f.isEmpty(t)
		})
	}
}

func TestABadRequestAboutTheStoreIsRefusedAndSaysWhy(t *testing.T) {
	testkit.Start(t)
	s, dir := inFolder(t)
	storetest.Put(t, s, "x", []byte("abc"))
	storetest.Put(t, s, "y", []byte("abc"))
	whole(t, filepath.Join(dir, "model.safetensors"), "w", []byte("abcd"))
	f := serve(t, func(c *server.Config) { c.Store = s })
	stub := pb.NewTensorServiceClient(f.dial(t))
	list := func(glob string) func() error {
		return func() error { _, err := stub.ListTensors(t.Context(), &pb.ListTensorsRequest{Glob: glob}); return err }
	}
	remove := func(names ...string) func() error {
		return func() error {
			_, err := stub.DeleteTensors(t.Context(), &pb.DeleteTensorsRequest{Names: names})
			return err
		}
	}
	transfer := func(id []byte) func() error {
		return func() error {
			_, err := stub.GetTransfer(t.Context(), &pb.GetTransferRequest{TransferId: id})
			return err
		}
	}
	const invalid = codes.InvalidArgument
	for name, tc := range map[string]struct {
		ask  func() error
		code codes.Code
		says []string
	}{
		"a malformed glob":          {list("[x"), invalid, []string{`"[x"`, "bad pattern"}},
		"a glob of 513 bytes":       {list(strings.Repeat("*", 513)), invalid, []string{"glob", "513", "512"}},
		"a glob of 500 KiB":         {list(strings.Repeat("[", 500<<10)), invalid, []string{"glob", "512"}},
		"a glob with a bell":        {list("\a"), invalid, []string{"glob", "control"}},
		"no names":                  {remove(), invalid, []string{"names: none"}},
		"1025 names":                {remove(slices.Repeat([]string{"x"}, 1025)...), codes.ResourceExhausted, []string{"1025", "1024", "several"}},
		"an empty name":             {remove("x", ""), invalid, []string{"names[1]", "empty"}},
		"a name of 513 bytes":       {remove("x", strings.Repeat("n", 513)), invalid, []string{"names[1]", "513", "512"}},
		"an unknown name":           {remove("x", "nothing"), codes.NotFound, []string{`"nothing"`}},
		"a path":                    {remove("../../etc/passwd"), codes.NotFound, []string{"../../etc/passwd"}},
		"a glob without a match":    {remove("x", "q*"), codes.NotFound, []string{`no tensor matches "q*"`}},
		"a malformed glob of names": {remove("[x"), invalid, []string{"bad pattern"}},
		"a tensor of a file":        {remove("model/w"), codes.FailedPrecondition, []string{"part of a file", "model.safetensors", "delete that file"}},
		"a transfer of 15 bytes":    {transfer(make([]byte, 15)), invalid, []string{"transfer_id", "16 bytes"}},
		"a transfer of zeros":       {transfer(make([]byte, 16)), invalid, []string{"transfer_id", "zero"}},
		"an unknown transfer":       {transfer(newID()), codes.NotFound, []string{"neither open"}},
	} {
		t.Run(name, func(t *testing.T) {
			st := status.Convert(tc.ask())
			require.Equal(t, tc.code, st.Code(), st.Message())
			saysWhy(t, st.Message(), tc.says)
			require.NotContains(t, st.Message(), dir)
			require.Equal(t, []string{"model/w", "x", "y"}, storetest.Names(t, s), "nothing was removed")
		})
	}
	// 1024 that pick the same are no more work than one.
	r, err := stub.DeleteTensors(t.Context(), &pb.DeleteTensorsRequest{Names: slices.Repeat([]string{"[xy]"}, 1024)})
	require.NoError(t, err)
	require.Equal(t, []string{"x", "y"}, r.GetDeleted())
	// A name is taken as it is before it is a glob.
	storetest.Put(t, s, "a?", []byte("abc"))
	storetest.Put(t, s, "ab", []byte("abc"))
	for _, want := range []string{"a?", "ab"} {
		r, err := stub.DeleteTensors(t.Context(), &pb.DeleteTensorsRequest{Names: []string{"a?"}})
		require.NoError(t, err)
		require.Equal(t, []string{want}, r.GetDeleted())
	}

	bare := serve(t, nil)
	_, err = pb.NewTensorServiceClient(bare.dial(t)).DeleteTensors(t.Context(), &pb.DeleteTensorsRequest{Names: []string{"x"}})
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
	saysWhy(t, status.Convert(err).Message(), []string{"no store"})
}

func TestARequestOfManyPartsIsRefusedBeforeTheyAreMade(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, mib)
	storetest.Put(t, m, "x", []byte("abc"))
	f := serve(t, func(c *server.Config) { c.Store = m })
	const limit = 16 << 10
	for by := range 2 {
		x := &pb.Selection{Name: "x"}
		for i := range limit - 4 + by { // hello, its id, the selection and its name
			x.Held = append(x.Held, &pb.Range{Offset: uint64(10 + i), Length: 1})
		}
		p := pullAll(t, f, x)
		if by == 0 {
			require.Zero(t, p.summary(t, "x").GetCode())
			continue
		}
		require.Equal(t, codes.ResourceExhausted, p.status.Code())
		saysWhy(t, p.status.Message(), []string{"parts", "16384", "16385"})
	}
	stub := pb.NewTensorServiceClient(f.dial(t))
	_, err := stub.DeleteTensors(t.Context(), &pb.DeleteTensorsRequest{Names: make([]string, 500_000)})
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	saysWhy(t, status.Convert(err).Message(), []string{"parts", "16384"})
	_, err = stub.Compute(t.Context(), &pb.ComputeRequest{Model: "echo", Inputs: slices.Repeat([]*pb.NamedTensor{{}}, 500_000)})
	saysWhy(t, status.Convert(err).Message(), []string{"parts", "16384"})
	_, err = stub.Compute(t.Context(), asking("echo", pb.DataType_DATA_TYPE_UINT8, make([]byte, mib), mib))
	require.NoError(t, err)
}

func TestAListComesInPagesOfTheLimit(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 64*mib)
	f := serve(t, func(c *server.Config) { c.Store = m })
	stub := pb.NewTensorServiceClient(f.dial(t))
	pages := func(size uint32) (counts []int) {
		for token := ""; ; {
			r, err := stub.ListTensors(t.Context(), &pb.ListTensorsRequest{PageSize: size, PageToken: token})
			require.NoError(t, err)
			require.Less(t, proto.Size(r), 4*mib, "a stock client takes no more")
			counts = append(counts, len(r.GetTensors()))
			if token = r.GetNextPageToken(); token == "" {
				return counts
			}
		}
	}
	for i := range 1000 {
		storetest.Put(t, m, fmt.Sprintf("%04d%s", i, strings.Repeat("n", 100)), []byte{1})
	}
	require.Equal(t, []int{1000}, pages(0))
	storetest.Put(t, m, "one more", []byte{1})
	for _, size := range []uint32{0, 1000, 1001, 1<<32 - 1} {
		require.Equal(t, []int{1000, 1}, pages(size))
	}
	require.Equal(t, []int{500, 500, 1}, pages(500))
	for i := range 300 { // a page ends before its names have more than 128 KiB
		storetest.Put(t, m, fmt.Sprintf("z%03d%s", i, strings.Repeat("n", 508)), []byte{1})
	}
	require.Equal(t, []int{1000, 253, 48}, pages(0))
	r, err := stub.ListTensors(t.Context(), &pb.ListTensorsRequest{PageToken: strings.Repeat("\uffff", 100_000)})
	require.NoError(t, err)
	require.Empty(t, r.GetTensors())
}

// dialHTTP2 returns a connection that speaks HTTP/2 by hand, and its frames.
func dialHTTP2(t testing.TB, addr string) *attack.Conn {
	t.Helper()
	conn, err := connect(t.Context(), addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(rawLife)))
	c, err := attack.NewConn(t.Context(), conn, 64<<10)
	require.NoError(t, err)
	return c
}

func TestTheServersSettingsTellItsLimits(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.WindowBytes, c.StreamsPerConnection, c.HeaderListBytes = 3*mib, 7, 5000 })
	first, err := dialHTTP2(t, f.addr).ReadFrame()
	require.NoError(t, err)
	require.IsType(t, new(http2.SettingsFrame), first)
	info, err := f.server.GetServiceInfo(t.Context(), nil)
	require.NoError(t, err)
	for id, limit := range map[http2.SettingID]string{3: "streams_per_connection", 4: "window_bytes", 6: "header_list_bytes"} {
		have, _ := first.(*http2.SettingsFrame).Value(id)
		require.EqualValues(t, info.GetLimits()[limit], have, limit)
	}
}

func TestAPeerThatDoesNotAnswerAPingIsDisconnected(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *server.Config) { c.Keepalive, c.KeepaliveTimeout = time.Second, time.Second }) // gRPC's least
		h := dialHTTP2(t, f.addr)
		pinged := false
		for {
			got, err := h.ReadFrame()
			if err != nil {
				break // disconnected
			}
			ping, is := got.(*http2.PingFrame)
			pinged = pinged || is && !ping.IsAck()
		}
		require.True(t, pinged)
	})
}

func TestAPeerThatPingsTooOftenIsDisconnected(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) { // gRPC takes a second to close it
		f := serve(t, nil)
		h := dialHTTP2(t, f.addr)
		debug := ""
		for h.WritePing(false, [8]byte{}) == nil {
			got, err := h.ReadFrame()
			if err != nil {
				break
			}
			if end, is := got.(*http2.GoAwayFrame); is {
				debug = string(end.DebugData())
			}
		}
		require.Contains(t, debug, "too_many_pings")
	})
	// One that pings as often as it may is served.
	patient := serve(t, func(c *server.Config) { c.KeepaliveMin = time.Nanosecond })
	h := dialHTTP2(t, patient.addr)
	for range 10 {
		require.NoError(t, h.WritePing(false, [8]byte{}))
		for answered := false; !answered; {
			got, err := h.ReadFrame()
			require.NoError(t, err)
			_, gone := got.(*http2.GoAwayFrame)
			require.False(t, gone)
			ping, is := got.(*http2.PingFrame)
			answered = is && ping.IsAck()
		}
	}
}

func TestASessionWhoseClientDoesNotReadGivesItsResultsBack(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		log := &notes{}
		f := serve(t, func(c *server.Config) {
			c.Log, c.Session.ChunkIdle, c.Session.SessionIdle = log.log(), stream.Instant(500*time.Millisecond), stream.Instant(time.Second)
		})
		r := openRaw(t, f.addr)
		r.hold = true
		o := offering("echo", make([]byte, 4*mib), mib)
		r.open(o)
		r.deliver(o)
		r.until(func() bool { return len(r.results) == 1 })
		for id := range r.results {
			r.send(&pb.Frame{Credits: []*pb.Credit{{TensorId: []byte(id), ChunkLimit: 16}}})
		}
		f.isEmpty(t) // the client has read nothing since
		require.Contains(t, log.String(), "does not read")
		require.Positive(t, f.counters(t)["sent_bytes_total"])
	})
}
