// Package devicetest holds what tests of and with devices need.
//
// [Fake] is a device in memory for tests of what is above a device: it counts,
// enforces limits, injects faults, runs hooks in the middle of a registration, and
// reports misuse.
//
// [Run] is the conformance suite that every [device.Device] passes; it can also prove,
// through hooks into the device's data path, which pages a registration points at. To
// check a device of your own:
//
//	func TestConforms(t *testing.T) {
//		devicetest.Run(t, func(t *testing.T) device.Device {
//			d, err := mine.Open()
//			if err != nil {
//				t.Fatal(err)
//			}
//			t.Cleanup(func() { _ = d.Close() })
//			return d
//		}, &devicetest.Options{Read: read, Write: write, RemoteRead: …, NewQueue: …})
//	}
//
// What is tested of the optional interfaces, which are found by type assertion:
//
//	interface        without hooks                        with hooks
//	Updater          keys, range and access stay; a       Read, Write: old pages before,
//	                 failure leaves the old pages or      new pages after, never both;
//	                 says that all is lost                old pages after a failure
//	RevokingUpdater  enabled and revoked are two states,  Read, Write: what is revoked
//	                 each verb has its errors in each;    reaches nothing, what is loaded
//	                 keys stay taken while revoked;       the pages mapped then
//	                 calls at the same time
//	Flusher          ends without work, changes nothing   -
//	Exposer          what can't be exposed; keys of       RemoteRead, RemoteWrite: the
//	                 their own, another each time; the    range and the access hold, to
//	                 registration can't go; it ends       the byte; nothing is reached
//	                 once; updates of what is exposed     after Withdraw or Revoke
//	FastRegistrar    keys are reserved and freed, not     NewQueue: order of the queue,
//	and WorkQueue    while they mean something            256 rotations, outcomes told
//	                                                      once, what isn't posted, a queue
//	                                                      in error; Queue.Read: an old key
//	                                                      reaches nothing
//	Close            calls afterwards, and meanwhile      -
//
// A device whose method returns device.ErrNotSupported must have changed nothing; the
// tests of the interface are skipped then, and say so.
package devicetest
