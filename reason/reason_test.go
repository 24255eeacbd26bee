package reason_test

import (
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/reason"
)

func TestEachReasonIsOnceInTheTable(t *testing.T) {
	seen := map[reason.Reason]bool{}
	for _, r := range reason.Table {
		switch code := reason.Find(r.Code, ""); {
		case seen[r.Reason]:
			t.Errorf("%s is there twice", r.Reason)
		case reason.Parse(string(r.Reason)) != r.Reason:
			t.Errorf("%q is not a reason", r.Reason)
		case code.Reason != r.Code || code.Code != r.Code:
			t.Errorf("%s: %s is not a code", r.Reason, r.Code)
		case r.Title == "" || r.Exit == 0 || r.Side == "":
			t.Errorf("%s lacks something", r.Reason)
		}
		seen[r.Reason] = true
		if rest := strings.NewReplacer(reason.Asked, "", reason.Flag, "").Replace(r.Do); strings.ContainsAny(rest, "{}") {
			t.Errorf("%s: %q has an unknown place for a flag", r.Reason, r.Do)
		}
	}
}

func TestAnOlderOrNewerPeersFailureHasTheRowOfItsCode(t *testing.T) {
	for _, tc := range []struct {
		r    reason.Reason
		code string
		want reason.Reason
	}{
		{reason.StoreFull, "RESOURCE_EXHAUSTED", reason.StoreFull},
		{reason.StoreFull, "", reason.StoreFull},
		{"", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"},
		{"OF_A_NEWER_PEER", "NOT_FOUND", "NOT_FOUND"},
		{"", "", "UNKNOWN"},
	} {
		if got := reason.Find(tc.r, tc.code).Reason; got != tc.want {
			t.Errorf("%q with %q has the row of %s, not of %s", tc.r, tc.code, got, tc.want)
		}
	}
}
