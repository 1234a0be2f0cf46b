// test_options.c - every option in every spelling, every way to get one wrong, and --help.
#include "../../llmc/model/training_options.h"
#include "expect_death.h"

typedef struct { Options o; OptionTable table; } Parsed;

static void parse(Parsed* p, const char* const* arguments) {
    char* argv[16] = { (char*)"program" };
    int argc = 1;
    for (; arguments[argc - 1]; argc++) argv[argc] = (char*)arguments[argc - 1];
    p->o = options_defaults();
    p->table = options_table("train_gpt2_test", "a test");
    options_common(&p->table, &p->o);
    options_parse(&p->table, argc, argv);
}
#define parsed(p, ...) do { \
        const char* const arguments_[] = { __VA_ARGS__, NULL }; \
        parse(p, arguments_); \
    } while (0)

// Returns a value that the option accepts and that is not its default.
static const char* some_value(const OptionSpec* s, char* out, size_t size) {
    if (s->kind == OPTION_TEXT) snprintf(out, size, "some=text with --dashes");
    if (s->kind == OPTION_INT) snprintf(out, size, "%.0f", *(long long*)s->value == (long long)s->high ? s->low : s->high);
    if (s->kind == OPTION_FLOAT) snprintf(out, size, "%.17g", s->low + (s->high - s->low) / 3);
    if (s->kind == OPTION_CHOICE) snprintf(out, size, "%s", strrchr(s->form, '|') + 1);
    return out;
}

static void assert_has(const OptionSpec* s, const char* text) {
    char found[128];
    if (s->kind == OPTION_FLOAT) {
        assert_true(*(double*)s->value == strtod(text, NULL));
        return;
    }
    option_format(s, found, sizeof found);
    assert_string_equal(found, s->kind == OPTION_FLAG ? "on" : text);
}
TEST(every_option_takes_a_value_of_its_own_in_every_spelling) {
    Parsed p;
    parsed(&p, NULL);
    const int count = p.table.count;
    assert_true(count > 35);
    for (int i = 0; i < count; i++) {
        parsed(&p, NULL);
        OptionSpec* s = &p.table.specs[i];
        char value[64] = "", name[64], joined[160], letter[3] = { '-', s->letter, 0 };
        assert_int_not_equal(s->letter, 'h'); // that is --help
        some_value(s, value, sizeof value);
        snprintf(name, sizeof name, "--%s", s->name);
        snprintf(joined, sizeof joined, "--%s=%s", s->name, value);
        bool flag = s->kind == OPTION_FLAG;
        for (int spelling = 0; spelling < (s->letter ? 3 : 2); spelling++) {
            if (flag && spelling == 1) continue;
            if (flag) parsed(&p, name);
            else if (spelling == 1) parsed(&p, joined);
            else parsed(&p, spelling == 0 ? name : letter, value);
            assert_has(s, value);
            for (int k = 0; k < count; k++) {
                assert_int_equal(p.table.specs[k].given, k == i); // also if two have one name
                assert_true((p.table.specs[k].value == s->value) == (k == i));
            }
            assert_true(option_given(&p.table, s->name));
        }
    }
}

TEST(the_last_of_several_values_counts_and_a_switch_is_turned_off_by_no) {
    Parsed p;
    parsed(&p, "--steps", "5", "-n", "7", "--lr=1e-4", "--lr", "2e-4", "--out=", "--val-data", "", "--resume", "--no-resume");
    assert_true(p.o.steps == 7 && p.o.lr == 2e-4 && p.o.resume == 0 && option_given(&p.table, "resume"));
    assert_string_equal(p.o.out, "");
    assert_string_equal(p.o.val_data, "");
    parsed(&p, "--no-resume", "--resume");
    assert_int_equal(p.o.resume, 1);
}

TEST(numbers_at_the_ends_of_their_range_are_taken_and_beyond_are_errors) {
    Parsed p, all;
    parsed(&all, NULL);
    for (int i = 0; i < all.table.count; i++) {
        OptionSpec s = all.table.specs[i];
        if (s.kind != OPTION_INT && s.kind != OPTION_FLOAT) continue;
        const char* form = s.kind == OPTION_INT ? "--%s=%.0f" : "--%s=%.17g";
        const double inside[2] = { s.low, s.high };
        bool whole = s.kind == OPTION_INT;
        const double outside[2] = { whole ? s.low - 1 : s.low - 1e-9, whole ? s.high + 1 : s.high * 1.001 };
        for (int end = 0; end < 2; end++) {
            char text[96];
            snprintf(text, sizeof text, form, s.name, inside[end]);
            parsed(&p, text);
            snprintf(text, sizeof text, form, s.name, outside[end]);
            expect_error(parsed(&p, text), s.name, "must be between", strchr(text, '=') + 1);
        }
    }
}

TEST(unknown_options_are_named_and_so_are_bad_values_with_their_option) {
    static const struct { const char *first, *second, *says, *more; } wrong[] = { // an argument, or two, and what the error says
        { "--stepz", "5", "unknown option '--stepz'", "--help" }, { "--stepz=5", NULL, "unknown option '--stepz'", NULL },
        { "--step", "5", "unknown option '--step'", NULL }, // no abbreviations: they would change meaning later
        { "-steps", "5", "unknown option '-steps'", NULL }, { "-x", NULL, "unknown option '-x'", NULL },
        { "steps", NULL, "unknown option 'steps'", NULL },
        { "--", NULL, "unknown option '--'", NULL }, { "", NULL, "unknown option ''", NULL },
        { "--no-steps", NULL, "unknown option '--no-steps'", NULL },
        { "--no-", NULL, "unknown option '--no-'", NULL },
        { "--steps", NULL, "--steps needs a value", "N" }, { "--steps", "ten", "--steps wants a whole number", "'ten'" },
        { "--steps", "10x", "--steps wants a whole number", "'10x'" }, { "--steps", "1.5", "--steps wants a whole number", "'1.5'" },
        { "--steps", " 1", "--steps wants a whole number", "' 1'" }, { "--steps=", NULL, "--steps wants a whole number", "''" },
        { "--steps", "99999999999999999999", "--steps", "99999999999999999999" }, { "--lr", "fast", "--lr wants a number", "'fast'" },
        { "--lr=", NULL, "--lr wants a number", "''" }, { "--lr", "1e-3 ", "--lr wants a number", NULL },
        { "--lr", "nan", "--lr must be between", "nan" },
        { "--lr", "inf", "--lr must be between", "inf" },
        { "--lr-schedule", "cos", "--lr-schedule must be one of cosine|linear|constant|wsd", "'cos'" },
        { "--lr-schedule", "cosine|linear", "--lr-schedule must be one of", "'cosine|linear'" },
        { "--lr-schedule=", NULL, "--lr-schedule must be one of", "''" },
        { "--resume=yes", NULL, "--resume is a switch", "--no-resume turns it off" },
        { "--no-resume=yes", NULL, "--resume is a switch", NULL }
    };
    Parsed p;
    for (size_t i = 0; i < COUNT(wrong); i++)
        expect_error(parsed(&p, wrong[i].first, wrong[i].second), wrong[i].says, wrong[i].more ? wrong[i].more : "");
}

TEST(mistakes_of_a_stage_file_do_not_go_unseen) {
    Parsed p;
    parsed(&p, NULL);
    expect_error(for (int i = 0; i <= MAX_OPTIONS; i++) option_int(&p.table, "one_more", &p.o.steps, 0, 1, ""), "option table is full");
    expect_error(option_given(&p.table, "stepz"), "no option --stepz");
}

// ---- --help ----
TEST(help_lists_every_option_with_its_default_and_ends_well) {
    const char* const spellings[] = { "--help", "-h" };
    for (int k = 0; k < 2; k++) {
        Parsed p;
        FREED_BY(child_free) Child c = child_does(parsed(&p, "--steps", "77", spellings[k], "--no-such-option"));
        assert_int_equal(c.status, 0);
        assert_string_equal(c.err, "");
        assert_non_null(strstr(c.out, "train_gpt2_test: a test"));
        parsed(&p, "--steps", "77");
        for (int i = 0; i < p.table.count; i++) {
            OptionSpec s = p.table.specs[i];
            char start[96], value[64], end[128];
            snprintf(start, sizeof start, "--%s ", s.name);
            option_format(&s, value, sizeof value);
            const char* quote = s.kind == OPTION_TEXT ? "'" : "";
            snprintf(end, sizeof end, "  [%s%s%s]\n", quote, value, quote);
            const char* line = strstr(c.out, start);
            assert_non_null(line);
            const char* help = strstr(line, s.help);
            assert_non_null(help);
            assert_true(strncmp(help + strlen(s.help), end, strlen(end)) == 0);
        }
    }
}
