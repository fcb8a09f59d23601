package uring

import (
	"testing"
	"unsafe"
)

// Sizes and offsets are those of include/uapi/linux/io_uring.h.
func TestLayout(t *testing.T) {
	for _, c := range []struct {
		name      string
		got, want uintptr
	}{
		{"sizeof io_uring_params", unsafe.Sizeof(Params{}), 120},
		{"io_uring_params.features", unsafe.Offsetof(Params{}.Features), 20},
		{"io_uring_params.wq_fd", unsafe.Offsetof(Params{}.WqFd), 24},
		{"io_uring_params.sq_off", unsafe.Offsetof(Params{}.SQOff), 40},
		{"io_uring_params.cq_off", unsafe.Offsetof(Params{}.CQOff), 80},
		{"sizeof io_sqring_offsets", unsafe.Sizeof(SQRingOffsets{}), 40},
		{"io_sqring_offsets.tail", unsafe.Offsetof(SQRingOffsets{}.Tail), 4},
		{"io_sqring_offsets.ring_mask", unsafe.Offsetof(SQRingOffsets{}.RingMask), 8},
		{"io_sqring_offsets.flags", unsafe.Offsetof(SQRingOffsets{}.Flags), 16},
		{"io_sqring_offsets.array", unsafe.Offsetof(SQRingOffsets{}.Array), 24},
		{"io_sqring_offsets.user_addr", unsafe.Offsetof(SQRingOffsets{}.UserAddr), 32},
		{"sizeof io_cqring_offsets", unsafe.Sizeof(CQRingOffsets{}), 40},
		{"io_cqring_offsets.ring_mask", unsafe.Offsetof(CQRingOffsets{}.RingMask), 8},
		{"io_cqring_offsets.overflow", unsafe.Offsetof(CQRingOffsets{}.Overflow), 16},
		{"io_cqring_offsets.cqes", unsafe.Offsetof(CQRingOffsets{}.CQEs), 20},
		{"sizeof io_uring_sqe", unsafe.Sizeof(SQE{}), 64},
		{"io_uring_sqe.fd", unsafe.Offsetof(SQE{}.Fd), 4},
		{"io_uring_sqe.off", unsafe.Offsetof(SQE{}.Off), 8},
		{"io_uring_sqe.addr", unsafe.Offsetof(SQE{}.Addr), 16},
		{"io_uring_sqe.len", unsafe.Offsetof(SQE{}.Len), 24},
		{"io_uring_sqe.rw_flags", unsafe.Offsetof(SQE{}.OpFlags), 28},
		{"io_uring_sqe.user_data", unsafe.Offsetof(SQE{}.UserData), 32},
		{"io_uring_sqe.buf_index", unsafe.Offsetof(SQE{}.BufIndex), 40},
		{"io_uring_sqe.personality", unsafe.Offsetof(SQE{}.Personality), 42},
		{"io_uring_sqe.file_index", unsafe.Offsetof(SQE{}.FileIndex), 44},
		{"io_uring_sqe.addr3", unsafe.Offsetof(SQE{}.Addr3), 48},
		{"sizeof io_uring_cqe", unsafe.Sizeof(CQE{}), 16},
		{"io_uring_cqe.res", unsafe.Offsetof(CQE{}.Res), 8},
		{"io_uring_cqe.flags", unsafe.Offsetof(CQE{}.Flags), 12},
		{"sizeof iovec", unsafe.Sizeof(Iovec{}), 16},
		{"iovec.iov_len", unsafe.Offsetof(Iovec{}.Len), 8},
		{"sizeof io_uring_rsrc_register", unsafe.Sizeof(RsrcRegister{}), 32},
		{"io_uring_rsrc_register.flags", unsafe.Offsetof(RsrcRegister{}.Flags), 4},
		{"io_uring_rsrc_register.data", unsafe.Offsetof(RsrcRegister{}.Data), 16},
		{"io_uring_rsrc_register.tags", unsafe.Offsetof(RsrcRegister{}.Tags), 24},
		{"sizeof io_uring_rsrc_update2", unsafe.Sizeof(RsrcUpdate2{}), 32},
		{"io_uring_rsrc_update2.offset", unsafe.Offsetof(RsrcUpdate2{}.Offset), 0},
		{"io_uring_rsrc_update2.data", unsafe.Offsetof(RsrcUpdate2{}.Data), 8},
		{"io_uring_rsrc_update2.tags", unsafe.Offsetof(RsrcUpdate2{}.Tags), 16},
		{"io_uring_rsrc_update2.nr", unsafe.Offsetof(RsrcUpdate2{}.Nr), 24},
	} {
		if c.got != c.want {
			t.Errorf("%s is %d, want %d", c.name, c.got, c.want)
		}
	}
}
